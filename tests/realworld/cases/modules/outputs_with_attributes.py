# Models that take and return mappings: dicts whose items are attributes, a mapping with a dict inside, a dataclass.
# outcome: equal
# compare: model, losses
# %%
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader


class AttrDict(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Result(dict):
    def __init__(self, loss, logits):
        super().__init__(loss=loss, logits=logits)
        self.loss, self.logits = loss, logits


class Batch(MutableMapping):
    def __init__(self, **items):
        self.items_held = items

    def __getitem__(self, key):
        return self.items_held[key]

    def __setitem__(self, key, value):
        self.items_held[key] = value

    def __delitem__(self, key):
        del self.items_held[key]

    def __iter__(self):
        return iter(self.items_held)

    def __len__(self):
        return len(self.items_held)


@dataclass
class Sample:
    x: torch.Tensor
    label: torch.Tensor
    mask: torch.Tensor = field(init=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch):
        x, label = (batch.x, batch.label) if isinstance(batch, (AttrDict, Sample)) else (batch["x"], batch["label"])
        logits = self.layer(x)
        make = AttrDict if isinstance(batch, AttrDict) else Result
        return make(loss=F.cross_entropy(logits, label, reduction="sum"), logits=logits)


def loader(kind):
    def collate(samples):
        x, label = zip(*samples)
        return kind(x=torch.stack(x), label=torch.stack(label))

    return DataLoader(list(zip(torch.randn(32, 4), torch.randint(3, (32,)))), batch_size=8, collate_fn=collate)


loaders = [loader(kind) for kind in (AttrDict, Batch, Sample)]
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
losses = []

# %% accelerate
for data in loaders:
    for batch in data:
        optimizer.zero_grad()
        result = model(batch)
        result.loss.backward()
        optimizer.step()
        losses.append((result.loss.item(), result["loss"].item(), len(result.logits)))
        losses.append(len(batch["x"]) if isinstance(batch, Batch) else len(batch.x))
