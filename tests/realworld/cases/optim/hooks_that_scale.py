# Hooks that scale gradients of the lower layers (discriminative fine-tuning by hand), registered in the cell that defines.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 4), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
for p in model[0].parameters():
    p.register_hook(lambda grad: grad * 0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
