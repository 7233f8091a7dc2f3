# parameters of a model that an earlier cell holds in a list, object, closure, dict, class and weak references, under FSDP
# outcome: equal
# runs: always
# compare: model, seen, first, values, same
# %%
import functools
import weakref
from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Entry = namedtuple("Entry", "name value")


class Penalty:
    def __init__(self, model):
        self.entries = [Entry(name, value) for name, value in model.named_parameters() if "weight" in name]

    def __call__(self):
        return sum(entry.value.pow(2).sum() for entry in self.entries)


class Slotted:
    __slots__ = ("value",)


class Gaussian:
    def __init__(self, mean, rho):
        self.mean, self.rho = mean, rho

    def sample(self):
        return self.mean + F.softplus(self.rho) * torch.ones(self.rho.shape)


class Layer(nn.Module):
    def __init__(self, num_in, num_out):
        super().__init__()
        self.mean = nn.Parameter(torch.randn(num_out, num_in) / 10)
        self.rho = nn.Parameter(torch.full((num_out, num_in), -3.0))
        self.weight = Gaussian(self.mean, self.rho)

    def forward(self, x):
        return F.linear(x, self.weight.sample())


class Registry:
    held = []


def watch(values):
    return lambda: sum(value.abs().sum() for value in values)


def scale(value, factor):
    return factor * value.mean()


model = nn.Sequential(Layer(4, 8), nn.ReLU(), nn.Linear(8, 3))
params = list(model.parameters())
references = [weakref.ref(value) for value in params]
first = model[2].weight
penalty, slotted = Penalty(model), Slotted()
slotted.value = params[1]
largest = watch(tuple(params))
names = {value: name for name, value in model.named_parameters()}
mean_of_bias = functools.partial(scale, model[2].bias)
Registry.held.append(model[2].bias)
frozen = {model[2].bias}
opt = torch.optim.Adam(params, lr=0.02)
loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,))), batch_size=8, shuffle=True)
seen = []


def epoch():
    for x, y in loader:
        loss = F.cross_entropy(model(x), y) + 0.01 * penalty() + 0.001 * largest() + 0.1 * mean_of_bias(factor=2)
        loss = loss + 0.01 * sum(reference().pow(2).mean() for reference in references)
        loss = loss + 0.01 * slotted.value.pow(2).sum() + 0.01 * Registry.held[0].pow(2).sum()
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
        seen.append((loss.item(), norm.item(), first.norm().item()))


# %% accelerate --strategy fsdp
epoch()
same = [names[value] for value in model.parameters()] + [value in frozen for value in model.parameters()]
# %%
same += [one is other for one, other in zip(params, model.parameters())] + [first is model[2].weight]
same += [reference() is value for reference, value in zip(references, params)]
# %% accelerate --strategy fsdp
model[0].rho.requires_grad_(False)
epoch()
# %%
values = [value.detach().clone() for value in (*params, *(entry.value for entry in penalty.entries), slotted.value)]
