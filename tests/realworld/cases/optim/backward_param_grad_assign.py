# Backward param grad assign.
# outcome: equal
# compare: model, old, optimizer, g
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
criterion = nn.MSELoss()

# %% accelerate
losses = []
for x, y in loader:
    out = model(x)
    loss = criterion(out, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    old = [p.grad for p in model.parameters()]  # references, not copies
    optimizer.zero_grad(set_to_none=True)
    (0.1 * model(x).pow(2).mean()).backward()
    for p, g in zip(model.parameters(), old):
        p.grad = p.grad + g
    optimizer.step()
    losses.append(loss.item())
print(losses[-1])
