# weight_norm and spectral_norm of the older kind (forward pre-hooks), made in an earlier cell.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(
    nn.utils.spectral_norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(xb), yb).backward()
        optimizer.step()
