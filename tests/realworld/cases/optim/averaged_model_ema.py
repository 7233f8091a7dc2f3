# AveragedModel with get_ema_multi_avg_fn, updated after each step.
# outcome: equal
# compare: model, ema_model
# %%
import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(33, 4), torch.randn(33, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)

# %% accelerate
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))
ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(xb), yb).backward()
        optimizer.step()
        ema_model.update_parameters(model)
