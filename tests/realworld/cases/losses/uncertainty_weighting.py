# Multi-task weights learned as log variances in a module of the cell.
# outcome: equal
# compare: model, weighting
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Weighting(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(n))

    def forward(self, losses):
        return sum(torch.exp(-self.log_vars[i]) * l + self.log_vars[i] for i, l in enumerate(losses))


x, y1, y2 = torch.randn(41, 4), torch.randn(41, 1), torch.randint(0, 3, (41,))
loader = DataLoader(TensorDataset(x, y1, y2), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
weighting = Weighting(2)
optimizer = torch.optim.SGD([*model.parameters(), *weighting.parameters()], lr=0.05)

# %% accelerate
for epoch in range(2):
    for xb, a, b in loader:
        out = model(xb)
        loss = weighting([F.mse_loss(out[:, :1], a), F.cross_entropy(out[:, 1:], b)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
