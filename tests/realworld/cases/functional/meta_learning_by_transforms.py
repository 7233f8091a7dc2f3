# Meta-learning: the loss after an inner step, mapped over tasks by vmap, trains the model's own weights; then plain steps.
# outcome: equal
# compare: model, losses
# %%
import torch
import torch.nn as nn
from torch.func import functional_call, grad, vmap

model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []


def loss_of(params, x, y):
    return (functional_call(model, params, (x,)) - y).square().mean()


def loss_after_step(params, x, y):
    grads = grad(loss_of)(params, x[:5], y[:5])
    return loss_of({name: p - 0.05 * grads[name] for name, p in params.items()}, x[5:], y[5:])


def train(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


def train_on_tasks():
    x = torch.randn(4, 10, 1)
    params = dict(model.named_parameters())
    train(vmap(loss_after_step, in_dims=(None, 0, 0))(params, x, x.sin()).mean())


# %% accelerate
for _ in range(3):
    train_on_tasks()

# %%
train_on_tasks()

# %% accelerate
for _ in range(2):
    x = torch.randn(8, 1)
    train((model(x) - x.cos()).square().mean())
    train_on_tasks()
