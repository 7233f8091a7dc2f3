# Lightning's Fabric in a loop of one's own.
# outcome: equal
# compare: weight
# needs: lightning
# %%
import torch
import torch.nn as nn
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(32, 4)
dataset = TensorDataset(x, x.sum(1, keepdim=True))

# %% accelerate
fabric = Fabric(accelerator="cpu", devices=1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=8))
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        fabric.backward(loss)
        optimizer.step()
weight = model.weight.detach().clone()
