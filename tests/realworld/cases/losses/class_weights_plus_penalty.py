# Weighted cross entropy plus an L2 penalty of the weights written by hand.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(48, 4)
y = (torch.rand(48) < 0.3).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 6.0]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        l2 = sum(p.pow(2).sum() for p in model.parameters())
        loss = criterion(model(xb), yb) + 1e-2 * l2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
