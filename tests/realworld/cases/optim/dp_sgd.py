# Dp sgd.
# outcome: equal
# compare: model, n, c, acc
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
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
    each = F.mse_loss(model(x), y, reduction="none").mean(1)
    acc = [torch.zeros_like(p) for p in model.parameters()]
    for l in each:
        model.zero_grad()
        l.backward(retain_graph=True)
        n = torch.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters()))
        c = min(1.0, 0.5 / (n.item() + 1e-6))
        for a, p in zip(acc, model.parameters()):
            a += c * p.grad
    for a, p in zip(acc, model.parameters()):
        p.grad = a / len(x) + 0.01 * torch.randn_like(p)
    optimizer.step()
    losses.append(each.mean().item())
print(losses)
