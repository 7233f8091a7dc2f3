# A notebook changes the dictionary and the list of its own module by their methods, before and inside of a marked cell.
# outcome: equal
# compare: rates, losses, net, settings.OPTIONS, settings.LAYERS
# %%
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn as nn

folder = tempfile.mkdtemp()
Path(folder, "options_of_a_module_settings.py").write_text(
    'OPTIONS = {"lr": 0.001, "schedule": {"decay": 1.0}}\nLAYERS = [4]\n\n\n'
    'def rate(step):\n    return OPTIONS["lr"] * OPTIONS["schedule"]["decay"] ** step * len(LAYERS)\n'
)
sys.path.insert(0, folder)
sys.modules.pop("options_of_a_module_settings", None)
import options_of_a_module_settings as settings

# %%
settings.OPTIONS.update(lr=0.2)
settings.OPTIONS["schedule"].update(decay=0.5)
settings.LAYERS.append(8)
net = nn.Linear(3, 1)
rates, losses = [], []


def train(steps):
    for step in range(steps):
        optimizer = torch.optim.SGD(net.parameters(), lr=settings.rate(step))
        loss = (net(torch.randn(8, 3)) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.append(settings.rate(step))
        losses.append(loss.item())


# %% accelerate
train(3)
settings.OPTIONS.update(lr=0.1)

# %%
settings.LAYERS.append(2)


def grow(layers):
    layers.append(4)


grow(settings.LAYERS)

# %% accelerate
train(2)
