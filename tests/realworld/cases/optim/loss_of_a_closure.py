# The loss that a step with a closure returns has the graph of its last evaluation, here and in the notebook.
# outcome: equal
# compare: model, losses, inside, after
# %%
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)
inside, losses = [], []

def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss

# %% accelerate
for _ in range(2):
    loss = optimizer.step(closure)
    losses.append(loss.item())
    inside.append((loss.requires_grad, loss.grad_fn is None, loss.shape))

# %%
after = [loss.requires_grad, loss.item()]
