# Hooks that close over an object, are one or are its method, on modules and a parameter; cells and the notebook register
# and remove hooks, and a handle of the notebook removes the hook of a cell.
# outcome: equal
# compare: acts, sums, counter, log, order, model, normed
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import remove_spectral_norm, remove_weight_norm, spectral_norm, weight_norm


class Store:
    def __init__(self):
        self.acts, self.handles = {}, []

    def attach(self, model):
        for name, part in model.named_modules():
            if isinstance(part, nn.Linear):
                self.handles.append(part.register_forward_hook(self.make(name)))
        return self

    def make(self, name):
        def hook(module, inputs, output):
            self.acts.setdefault(name, []).append(output.sum().item())

        return hook

    def remove(self):
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class Sums:
    def __init__(self):
        self.values, self.calls = [], 0

    def __call__(self, gradient):
        self.values.append(gradient.abs().sum().item())

    def count(self, module, inputs):
        self.calls += 1


model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
normed = nn.Sequential(weight_norm(nn.Linear(4, 2)), spectral_norm(nn.Linear(2, 2)))
optimizer = torch.optim.SGD([*model.parameters(), *normed.parameters()], lr=0.1)
x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
sums, log, order = Sums(), [], []
model[0].weight.register_hook(sums)
counting = model.register_forward_pre_hook(sums.count)
first = model.register_forward_hook(lambda module, inputs, output: log.append("first"))
store = Store().attach(model)


def train():
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x) + normed(x), y).backward()
        optimizer.step()


# %% accelerate
train()
second = model.register_forward_hook(lambda module, inputs, kwargs, output: log.append("second"), with_kwargs=True)
before = model.register_forward_hook(lambda module, inputs, output: log.append("before"), prepend=True)
train()
store.remove()
other = Store().attach(model)
remove_weight_norm(normed[0])
remove_spectral_norm(normed[1])

# %%
model(x), normed(x)
order.append(len(log))
second.remove()
third = model.register_forward_hook(lambda module, inputs, output: log.append("third"))

# %% accelerate
optimizer = torch.optim.SGD([*model.parameters(), *normed.parameters()], lr=0.1)
train()
third.remove()
counting.remove()
train()

# %%
train()
order += [list(model._forward_hooks).index(handle.id) for handle in (before, first)]
acts, counter, sums = [store.acts, other.acts], sums.calls, sums.values
