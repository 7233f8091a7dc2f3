# Gradients clipped by value, the norm of them computed by hand and kept.
# outcome: equal
# compare: model, norms
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = 3 * torch.randn(45, 4), torch.randn(45, 2)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% accelerate
norms = []
for xb, yb in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(xb), yb)
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.2)
    total = 0.0
    for p in model.parameters():
        total += p.grad.data.norm(2).item() ** 2
    norms.append(total ** 0.5)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
