# Gradients edited by hand between backward and step: scaled, the first layer's zeroed, centralised.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 4), torch.randn(40, 3)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(xb), yb).backward()
        for name, p in model.named_parameters():
            if name.startswith("0.") and epoch == 0:
                p.grad.zero_()
            elif p.grad.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
            p.grad.mul_(1 / (1 + p.grad.norm()))
        optimizer.step()
