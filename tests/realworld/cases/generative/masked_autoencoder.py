# Random masks for each sample drawn in the model's forward, the loss on what was masked only.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

data = torch.randn(40, 8)
loader = DataLoader(data, batch_size=8, shuffle=True)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(8))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        mask = torch.rand(x.shape) < 0.5
        prediction = self.net(torch.where(mask, self.token, x))
        return ((prediction - x) ** 2 * mask).sum() / mask.sum()


model = Masked()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for x in loader:
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
