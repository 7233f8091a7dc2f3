# Cross entropy with class weights for an unbalanced problem, uneven tail.
# outcome: equal
# compare: model
# runs: always
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(53, 4)
y = (torch.rand(53) < 0.2).long() + (torch.rand(53) < 0.1).long()
loader = DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
counts = torch.bincount(y, minlength=3)
criterion = nn.CrossEntropyLoss(weight=counts.sum() / (3.0 * counts.clamp(min=1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
