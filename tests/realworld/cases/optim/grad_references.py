# Grad references.
# outcome: equal
# compare: model, tasks, optimizer
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
tasks = []
for x, y in loader:  # gradients of each batch kept, then combined
    model.zero_grad(set_to_none=True)
    criterion(model(x), y).backward()
    tasks.append([p.grad for p in model.parameters()])
for i, p in enumerate(model.parameters()):
    p.grad = torch.stack([t[i] for t in tasks]).median(0)[0]
optimizer.step()
print([t[0].sum().item() for t in tasks])
