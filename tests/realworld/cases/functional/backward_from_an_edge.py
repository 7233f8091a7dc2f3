# A backward pass begins at an edge of the graph, and not at the loss.
# outcome: refused pass the tensor itself
# compare: model
# %%
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

inputs = torch.randn(32, 5)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for x, y in zip(inputs.split(8), targets.split(8)):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    torch.autograd.backward(get_gradient_edge(loss))
    optimizer.step()
