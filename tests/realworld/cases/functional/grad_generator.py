# Gradients by torch.autograd.grad of an iterator of parameters.
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
optimizer = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
criterion = nn.MSELoss()

# %% accelerate
losses = []
for x, y in loader:
    loss = criterion(model(x), y)
    gs = torch.autograd.grad(loss, model.parameters())
    with torch.no_grad():
        for p, g in zip(model.parameters(), gs):
            p -= 0.01 * g
    losses.append(loss.item())
print(losses[-1])
optimizer.zero_grad()
