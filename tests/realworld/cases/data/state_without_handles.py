# Objects whose __getstate__ leaves out what a process holds: a cell changes the rest, and other names still see it.
# outcome: equal
# compare: log, open_files, cached, counts, inner, total, model
# %%
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Record:
    def __init__(self):
        self.values, self.file, self.owner = [], open(os.devnull), "notebook"

    def __getstate__(self):
        state = dict(self.__dict__)
        del state["file"]
        state["owner"] = None
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.file = None


class Lines(Dataset):
    """opens its file when it is first read, as datasets of HDF5 files do"""

    def __init__(self):
        self.file, self.reads, self.x = None, 0, torch.randn(16, 4)

    def __getstate__(self):
        return {name: item for name, item in vars(self).items() if name != "file"}

    def __setstate__(self, state):
        self.__dict__.update(state, file=None)

    def __len__(self):
        return 16

    def __getitem__(self, i):
        if self.file is None:
            self.file = open(os.devnull)
        self.reads += 1
        return self.x[i], self.x[i].sum().view(1)


record, records = Record(), [Record(), Record()]
alias = record
data = Lines()
loader = DataLoader(data, batch_size=8)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    record.values.append(loss.item())
    records[1].values.append(loss.item())

# %%
log = list(alias.values)
alias.values.append(-1.0)
open_files = [item.file is not None for item in (record, *records)]
cached = [item.owner for item in (alias, *records)]
counts = [data.reads, data is loader.dataset]

# %% accelerate
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
total = sum(record.values) + sum(records[1].values)

# %%
inner = [item.values for item in records]
counts.append(data.reads)
