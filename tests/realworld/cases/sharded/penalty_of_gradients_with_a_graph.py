# A penalty on the gradients of divided weights: without their graph it would have no effect, and nothing would fail.
# outcome: refused would leave gradients that are divided
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(40, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

# %% accelerate --strategy fsdp
for inputs, targets in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward(create_graph=True)
    penalty = sum(parameter.grad.square().sum() for parameter in model.parameters())
    (nn.functional.mse_loss(model(inputs), targets) + 0.1 * penalty).backward()
    optimizer.step()
