# Sam eval.
# outcome: equal
# compare: model, losses
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.SGD(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
model.eval()

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            es = [0.05 * p.grad / norm for p in model.parameters()]
            for p, e in zip(model.parameters(), es):
                p.add_(e)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), es):
                p.sub_(e)
        optimizer.step()
        losses.append(loss.item())
print(losses[-1])
