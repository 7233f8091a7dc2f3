# Ewc fisher.
# outcome: equal
# compare: fisher, loss, p, model
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

# EWC: importance of each weight for the first task
model.eval()
fisher = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
for x, y in loader:
    model.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    for n, p in model.named_parameters():
        fisher[n] += p.grad.data**2 / len(loader)
star = {n: p.detach().clone() for n, p in model.named_parameters()}
# second task with the penalty
model.train()
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), -y) + 10 * sum(
        (fisher[n] * (p - star[n]) ** 2).sum() for n, p in model.named_parameters()
    )
    loss.backward()
    optimizer.step()
print(round(sum(f.sum().item() for f in fisher.values()), 4), round(loss.item(), 5))
