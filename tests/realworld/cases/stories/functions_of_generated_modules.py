# A library generates a module for each class of layers, whose function replaces a method, as PyTorch Geometric does.
# outcome: equal
# compare: losses, model, second
# %%

import importlib
import sys
from pathlib import Path

import torch
import torch.nn as nn

Path("site-packages").mkdir()
Path("site-packages/tinygraph.py").write_text('''
import importlib.util
import sys
import tempfile

import torch.nn as nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        kind = type(self)
        name = f"{kind.__module__}_{kind.__name__}_propagate"
        if not self.propagate.__module__.startswith(name):
            kind.propagate = load(name).propagate

    def forward(self, x):
        return self.propagate(x)

    def propagate(self, x):
        return self.message(x).sum(1)


def load(name):
    if name not in sys.modules:
        with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
            file.write("def propagate(self, x):\\n    return self.message(x).sum(1)\\n")
        spec = importlib.util.spec_from_file_location(name, file.name)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


class Sum(Layer):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size)

    def message(self, x):
        return self.inner(x)
''')
sys.path.insert(0, "site-packages")
sys.modules.pop("tinygraph", None)
importlib.invalidate_caches()
import tinygraph

X, Y = torch.randn(24, 5, 4), torch.randn(24, 4)


class Own(tinygraph.Layer):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def message(self, x):
        return self.weight * x


class InTheCell(Own):
    pass


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = (model[0](X) + model[1](X) - Y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


model = nn.ModuleList([tinygraph.Sum(4), Own()])
losses = []

# %% accelerate
train(model)
second = nn.ModuleList([tinygraph.Sum(4), InTheCell()])
train(second)

# %%
train(model)
second.append(InTheCell())
train(second)

# %% accelerate
train(second)
