# A callback that several fits share registers hooks on the model of each, collects statistics, and removes them.
# outcome: equal
# compare: model, statistics.means, len(statistics.hooks), len(model[1]._forward_hooks), num_collected
# %%
from functools import partial

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(40, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)


class Hook:
    def __init__(self, module, function):
        self.handle = module.register_forward_hook(partial(function, self))

    def __del__(self):
        self.handle.remove()


class Statistics:
    def __init__(self):
        self.hooks, self.means = [], []

    def begin(self, model):
        self.hooks = [Hook(module, self.collect) for module in model if isinstance(module, nn.ReLU)]

    def collect(self, hook, module, inputs, output):
        self.means.append(output.detach().mean().item())

    def end(self):
        for hook in self.hooks:
            hook.handle.remove()


class Learner:
    def __init__(self, model, callbacks):
        self.model, self.callbacks = model, callbacks

    def fit(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        for callback in self.callbacks:
            callback.begin(self.model)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(self.model(inputs), targets).backward()
            optimizer.step()
        for callback in self.callbacks:
            callback.end()


def make_model():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))


statistics = Statistics()
model = make_model()
learner = Learner(model, [statistics])

# %% accelerate
learner.fit()

# %%
num_collected = len(statistics.means)

# %% accelerate
model = make_model()
learner = Learner(model, [statistics])
learner.fit()

# %% accelerate
model = make_model()
Learner(model, [statistics]).fit()
