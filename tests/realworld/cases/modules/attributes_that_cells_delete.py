# Attributes that a cell deletes: of the model, of a layer that moves, and the plain weight that pruning leaves behind.
# outcome: equal
# compare: model, pruned, other, seen, after
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import prune


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
        self.cache, self.scale = [1], 0.5

    def forward(self, x):
        return self.layers(x) * getattr(self, "scale", 1.0)


model, pruned, other = Net(), nn.Linear(4, 2), nn.Linear(4, 2)
model.layers[1].note, model.layers[2].note, other.note = "first", "second", "third"
x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))


def train():
    parameters = [*model.parameters(), *pruned.parameters(), *other.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x) + pruned(x) + other(x), y).backward()
        optimizer.step()


def attributes():
    names = [name for part in (*model.modules(), pruned, other) for name in vars(part) if not name.startswith("_")]
    return sorted(names)


# %% accelerate
train()
prune.l1_unstructured(pruned, "weight", amount=0.4)
del model.cache
del other.note
train()

# %%
seen = [attributes()]
del model.scale

# %% accelerate
train()
prune.remove(pruned, "weight")
del model.layers[0]
del model.layers[1].note
seen.append(attributes())
train()

# %%
train()
after = [attributes(), model.layers[0].note, type(pruned.weight).__name__]
