# Models of the notebook that a cell compiles: as a new object, in place, and inside of a compiled function.
# outcome: equal
# compare: net, other, third, losses, accuracy
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(48, 6), torch.randint(0, 3, (48,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


def build():
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.SiLU(), nn.Linear(12, 3))


net, other, third = build(), build(), build()
optimizer = torch.optim.AdamW([*net.parameters(), *other.parameters(), *third.parameters()], lr=0.02)

# %% accelerate
compiled = torch.compile(net, backend="eager")
other.compile(backend="eager")


@torch.compile(backend="eager")
def third_loss(xb, yb):
    return F.cross_entropy(third(xb), yb)


losses = []
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(xb) + other(xb), yb) + third_loss(xb, yb)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
compiled.eval()
with torch.no_grad():
    accuracy = (compiled(x).argmax(1) == y).double().mean().item()
