# Parametrized weights that are computed once for the model and the loss, in a block of parametrize.cached.
# outcome: equal
# compare: model, losses
# %%
import torch
import torch.nn as nn
import torch.nn.utils.parametrize as parametrize
from torch.utils.data import DataLoader, TensorDataset


class Skew(nn.Module):
    def forward(self, weight):
        return torch.matrix_exp(weight.triu(1) - weight.triu(1).T)


x, y = torch.randn(40, 4), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
for layer in model[0], model[2]:
    parametrize.register_parametrization(layer, "weight", Skew())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []

# %% accelerate
for xb, yb in loader:
    with parametrize.cached():
        loss = nn.functional.mse_loss(model(xb), yb) + 0.1 * model[2].weight.diagonal().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
