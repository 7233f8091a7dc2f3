# An average of the weights by hand, which stage 3 holds in parts.
# outcome: refused the code computes with a parameter outside of the model's forward pass
# needs: deepspeed
# compare: model
# runs: always
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float32)
loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), batch_size=8)
model = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
average = {name: p.detach().clone() for name, p in model.named_parameters()}

# %% accelerate --strategy deepspeed --zero-stage 3
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        average[name].mul_(0.9).add_(p.data, alpha=0.1)
