# Code below library objects counts in names of the notebook: joined data sets, the sampler of a batch sampler, listeners.
# outcome: equal
# compare: model, counts, orders, heard
# %%
import types
from collections import Counter

import torch
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, Sampler

torch.manual_seed(0)
counts, orders, heard = Counter(), [], []


class Texts(Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        counts.update(text)
        return torch.tensor([float(text.count(letter)) for letter in "abc"]), float(len(text))


class Backwards(Sampler):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        orders.append(len(orders))
        yield from reversed(range(len(self.data)))


class Listener:
    def notify(self, loss):
        heard.append(loss)


data = ConcatDataset([Texts(["ab", "abc", "cab"]), Texts(["b", "cc", "aabb"])])
loader = DataLoader(data, batch_sampler=BatchSampler(Backwards(data), 2, drop_last=False))
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
hub = types.SimpleNamespace(listeners=[Listener()])


# %% accelerate
for x, y in loader:
    loss = ((model(x).squeeze(1) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for listener in hub.listeners:
        listener.notify(loss.item())

# %%
counts["a"] += 10
orders.append(-1)
heard.append(None)

# %% accelerate
for x, y in loader:
    loss = (model(x).squeeze(1) - y).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    hub.listeners[0].notify(loss.item())
