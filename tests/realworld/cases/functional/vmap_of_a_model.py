# A model that is mapped over groups of samples by vmap, and its derivative by the input by jacrev.
# outcome: equal
# compare: model, slopes
# %%
import torch
import torch.nn as nn
from torch.func import jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(24, 3, 4), torch.randn(24, 3, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
slopes = []

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(vmap(model)(xb), yb)
        slope = vmap(jacrev(lambda point: model(point).squeeze(-1)))(xb.flatten(0, 1))
        (loss + 0.01 * slope.pow(2).mean()).backward()
        optimizer.step()
        slopes.append(slope.norm().item())
