# Private attributes of modules: a tensor behind a property, a count of calls, and a table of a subclass of a layer.
# outcome: equal
# compare: model, losses, targets, calls, names
# %%
import torch
import torch.nn as nn


class Table(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


class Regression(nn.Module):
    def __init__(self, targets):
        super().__init__()
        self.layer = Table(3, 1)
        self.targets = targets
        self._calls = 0

    @property
    def targets(self):
        return self._targets

    @targets.setter
    def targets(self, value):
        object.__setattr__(self, "_targets", value)

    def forward(self, x):
        self._calls += 1
        return self.layer(x)


x = torch.randn(12, 3)
model = Regression(torch.randn(12, 1))
losses = []


def train(steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - model.targets).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# %% accelerate --strategy fsdp
train(3)

# %%
calls = [model._calls, model.layer.seen]
model.targets = model.targets / 2
train(1)

# %% accelerate --strategy fsdp
model._calls += 10
train(2)

# %%
calls += [model._calls, model.layer.seen]
targets, names = model.targets, sorted(name for name in vars(model) if name in ("_calls", "_targets"))
