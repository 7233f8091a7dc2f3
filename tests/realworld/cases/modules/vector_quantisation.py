# A VQ-VAE in small: nearest codes, straight-through gradients, codebook and commitment losses.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader


class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 3), nn.Linear(3, 6)
        self.codes = nn.Embedding(7, 3)

    def forward(self, x):
        z = self.encoder(x)
        index = torch.cdist(z, self.codes.weight).argmin(1)
        q = self.codes(index)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return self.decoder(z + (q - z).detach()), loss


data = torch.randn(44, 6)
loader = DataLoader(data, batch_size=8, shuffle=True)
model = VQ()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for x in loader:
        reconstruction, vq_loss = model(x)
        loss = F.mse_loss(reconstruction, x) + vq_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
