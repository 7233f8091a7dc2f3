# An optimizer of the notebook wraps another one by properties, collects what a hook of the model stores at each parameter, and skips steps.
# outcome: equal
# compare: model, losses, counted
# %%
import torch
import torch.nn as nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset


def count(module, args, result):
    for parameter in module.parameters(recurse=False):
        parameter.calls = getattr(parameter, "calls", 0) + 1


class Collecting(Optimizer):
    def __init__(self, inner, every):
        self.inner, self.every, self.num_steps = inner, every, 0
        self.sums = [torch.zeros_like(value) for value in self.values()]

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    @property
    def defaults(self):
        return self.inner.defaults

    def values(self):
        return [value for group in self.param_groups for value in group["params"]]

    def step(self, closure=None):
        self.num_steps += 1
        for total, value in zip(self.sums, self.values()):
            assert value.calls == self.num_steps, "each step follows one call of the model"
            total += value.grad
            value.grad = total / self.every
        if self.num_steps % self.every == 0:
            self.inner.step()
            for total in self.sums:
                total.zero_()

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


x = torch.randn(32, 5)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
for layer in (model[0], model[2]):
    layer.register_forward_hook(count)
optimizer = Collecting(torch.optim.SGD(model.parameters(), lr=0.1), every=2)
losses = []

# %% accelerate
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %%
counted = optimizer.num_steps, model[0].weight.calls
