# Lists and dicts of the notebook whose methods use attributes of theirs: items arrive as they are, and no method runs for them.
# outcome: equal
# compare: names, table, model
# %%
import torch
import torch.nn as nn


class Logged(list):
    def __init__(self, log, items=()):
        super().__init__()
        self.log = log
        self.extend(items)

    def append(self, item):
        self.log.append(item)
        super().append(item)

    def extend(self, items):
        for item in items:
            self.append(item)


class Counted(dict):
    def __init__(self):
        super().__init__()
        self.num_changes = 0

    def __setitem__(self, key, value):
        self.num_changes += 1
        super().__setitem__(key, value)


model = nn.Linear(3, 1)
model.seen, model.table = Logged([], ["first"]), Counted()
model.table["first"] = 1
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for name in ("second", "third"):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).mean().backward()
    optimizer.step()
    model.seen.append(name)
    model.table[name] = len(name)
own = Logged(["made in the cell"], ["fourth"])

# %%
names = [*model.seen, *model.seen.log, *own, *own.log]
table = [*model.table.items(), model.table.num_changes]
