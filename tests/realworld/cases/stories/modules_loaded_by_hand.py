# Modules that no import finds: one generated from a text, one loaded from its file and again after an edit.
# outcome: told reloaded on the workers
# compare: losses, model
# %%

import importlib.util
import sys
import tempfile

import torch
import torch.nn as nn

X, Y = torch.randn(32, 4), torch.randn(32, 1)


def load(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Generated(nn.Module):
    """Computes by a module that the first object of the class generates in each process."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)
        if "generated_of_a_text" not in sys.modules:
            with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
                file.write("def scale(x):\n    return 2 * x\n")
            load("generated_of_a_text", file.name)

    def forward(self, x):
        return sys.modules["generated_of_a_text"].scale(self.inner(x))


with open("by_hand.py", "w") as file:
    file.write("def shift(x):\n    return x + 1\n")
losses = []

# %% accelerate
load("by_hand", "by_hand.py")
import by_hand

for _ in range(2):
    model = Generated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = (by_hand.shift(model(X)) - Y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %%
model = Generated()
by_hand = load("by_hand", "by_hand.py")

# %% accelerate
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = (sys.modules["by_hand"].shift(model(X)) - Y).pow(2).mean()
optimizer.zero_grad()
loss.backward()
optimizer.step()
losses.append(loss.item())

# %%
with open("by_hand.py", "w") as file:
    file.write("# Edited.\n\n\ndef shift(x):\n    return x - 10\n")
load("by_hand", "by_hand.py")

# %% accelerate
loss = (sys.modules["by_hand"].shift(model(X)) - Y).pow(2).mean()
optimizer.zero_grad()
loss.backward()
optimizer.step()
losses.append(loss.item())
