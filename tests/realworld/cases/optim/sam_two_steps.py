# Sharpness-aware steps: two forward and backward passes for each batch, weights moved up and back by hand.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 4), torch.randint(0, 2, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rho = 0.05

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        nn.functional.cross_entropy(model(xb), yb).backward()
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
            moved = []
            for p in model.parameters():
                e = p.grad * (rho / (norm + 1e-12))
                p.add_(e)
                moved.append(e)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xb), yb).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moved):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
