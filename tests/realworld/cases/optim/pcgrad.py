# Pcgrad.
# outcome: equal
# compare: g1, grads, dot, g2, g, o2
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

# %% accelerate
for epoch in range(2):
    for x, y1, y2 in loader:
        o1, o2 = model(x)
        grads = []
        for loss in (F.mse_loss(o1, y1), F.mse_loss(o2, y2)):
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            grads.append(
                torch.cat(
                    [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for p in model.parameters()]
                )
            )
        g1, g2 = grads
        dot = g1 @ g2
        if dot < 0:
            g1, g2 = g1 - dot / g2.pow(2).sum() * g2, g2 - dot / g1.pow(2).sum() * g1
        g, at = g1 / g1.norm() + g2 / g2.norm(), 0
        for p in model.parameters():
            p.grad = g[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
    print(epoch, loss.item())
