# What a process draws for itself, as the name of a temporary folder, is the notebook's on all ranks in the next cell.
# outcome: equal
# compare: model, listed, loaded, back, same, names
# %%
import os
import tempfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn, optim

torch.manual_seed(0)
inputs, targets = torch.randn(12, 4), torch.randn(12, 1)
model = nn.Linear(4, 1)
opt = optim.SGD(model.parameters(), lr=0.05)
options = SimpleNamespace(steps=2)
runs = {"names": []}


def train():
    for step in range(options.steps):
        loss = ((model(inputs) - targets) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


# %% accelerate
folder = tempfile.mkdtemp()
kept = tempfile.TemporaryDirectory()
options.folder = Path("runs") / uuid.uuid4().hex
runs["names"].append(f"exp-{time.time_ns()}")
handle, file = tempfile.mkstemp()
os.write(handle, b"hello")
os.close(handle)
train()
torch.save(model.state_dict(), os.path.join(folder, "weights.pt"))
torch.save(model.state_dict(), os.path.join(kept.name, "weights.pt"))
# %%
listed = sorted(os.listdir(folder))
names = [str(options.folder), runs["names"][0]]
expected = list(names)
# %% accelerate
model.load_state_dict(torch.load(os.path.join(folder, "weights.pt")))
loaded = torch.load(os.path.join(kept.name, "weights.pt"))
back = open(file).read()
os.makedirs(options.folder)
Path(options.folder, "notes.txt").write_text(runs["names"][0])
train()
same = [str(options.folder), runs["names"][0]] == expected
# %%
same = same and [entry.name for entry in Path("runs").iterdir()] == [options.folder.name]
names = len(names)
# %% accelerate
Path(options.folder, "notes.txt").read_text()
train()
