# A GradScaler that is enabled on the CPU: scaled losses in double precision, scale kept.
# outcome: equal
# compare: model, scaler.get_scale()
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 4), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(xb), yb)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
