# Counter codebook.
# outcome: equal
# compare: model, losses, optimizer
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
loader = DataLoader(TensorDataset(X, X), batch_size=32, shuffle=True)
criterion = nn.MSELoss()


class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(4, 4)
        self.dec = nn.Linear(4, 4)
        self.calls = 0
        self.register_buffer("codebook", torch.randn(8, 4))

    def forward(self, x):
        z = self.enc(x)
        idx = torch.cdist(z, self.codebook).argmin(1)
        if self.training:
            self.calls += 1
            if self.calls % 3 == 0:  # restart unused codes from the batch, every few steps
                used = torch.bincount(idx, minlength=8) > 0
                dead = (~used).nonzero().squeeze(1)
                if len(dead):
                    self.codebook[dead] = z.detach()[: len(dead)]
        q = self.codebook[idx]
        return self.dec(z + (q - z).detach())


model = VQ()
optimizer = optim.Adam(model.parameters(), lr=1e-2)

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
