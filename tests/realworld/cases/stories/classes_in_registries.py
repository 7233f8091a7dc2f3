# Classes, one of a model, that register themselves by __init_subclass__ with an argument, and by a metaclass.
# outcome: equal
# compare: same, names, best, in_cell, made, head
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Named:
    known = {}

    def __init_subclass__(cls, name, **options):
        super().__init_subclass__(**options)
        Named.known[name] = cls


class Mean(Named, name="mean"):
    best = float("inf")

    def __call__(self, values):
        return sum(values) / len(values)


class Recorded(type):
    made = []

    def __init__(cls, *args):
        super().__init__(*args)
        Recorded.made.append(cls)


class Options(metaclass=Recorded):
    rate = 0.1


class Head(Named, nn.Linear, name="head"):
    pass


x, y = torch.randn(34, 6), torch.randint(0, 3, (34,))
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
model = Head(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=Options.rate)
metric = Named.known["mean"]()

# %% accelerate
for epoch in range(2):
    losses = []
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    Mean.best = min(Mean.best, metric(losses))
in_cell = Named.known["mean"] is Mean, type(metric) is Mean, Recorded.made == [Options], len(Named.__subclasses__())


class Last(Named, name="last"):
    pass


# %%
same = Named.known["mean"] is Mean, Named.known["last"] is Last, type(model) is Head, type(metric) is Mean
names, best = list(Named.known), Named.known["mean"].best
made = Recorded.made == [Options]
head = Named.known["head"] is Head
del Named, Mean, Last, Recorded, Head, Options, metric
