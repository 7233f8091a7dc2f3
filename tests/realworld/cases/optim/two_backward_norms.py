# Two backward norms.
# outcome: equal
# compare: norms, total
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y1 = X.sum(1, keepdim=True)
Y2 = X.prod(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y1, Y2), batch_size=32, shuffle=True)


class Multi(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 8)
        self.a = nn.Linear(8, 1)
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.shared(x))
        return self.a(h), self.b(h)


model = Multi()
optimizer = optim.SGD(model.parameters(), lr=1e-2)
norms = []

# %% accelerate
for epoch in range(2):
    for x, y1, y2 in loader:
        optimizer.zero_grad()
        o1, o2 = model(x)
        F.mse_loss(o1, y1).backward(retain_graph=True)
        F.mse_loss(o2, y2).backward()
        total = sum(p.grad.norm(2).item() ** 2 for p in model.parameters()) ** 0.5
        norms.append(total)
        optimizer.step()
    print(epoch, round(total, 5))
