# Gradients of a sharded model by autograd.grad, with zeros for what has none.
# outcome: refused torch.autograd.grad with respect to parameters is not possible for a sharded model
# compare: model
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
unused = nn.Parameter(torch.zeros(3))
# %% accelerate --strategy fsdp
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data, 16):
    trained = [*model.parameters(), unused]
    gradients = torch.autograd.grad(nn.functional.mse_loss(model(x), y), trained, materialize_grads=True)
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient
    optimizer.step()
