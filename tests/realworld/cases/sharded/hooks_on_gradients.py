# Hooks on the gradients of a sharded model, each rank of which has a part of the gradients.
# outcome: refused has a hook on its gradient
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 4), 5 * torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)

# %% accelerate --strategy fsdp
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
for p in model.parameters():
    p.register_hook(lambda grad: torch.clamp(grad, -0.1, 0.1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
