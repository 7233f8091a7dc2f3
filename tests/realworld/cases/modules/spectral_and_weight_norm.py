# Parametrised layers: spectral_norm and weight_norm, made in the cell that trains.
# outcome: equal
# compare: model, state
# %%
import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)

# %% accelerate
model = nn.Sequential(spectral_norm(nn.Linear(5, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(xb), yb).backward()
        optimizer.step()
state = {name: value.clone() for name, value in model.state_dict().items()}
