# A search tree of objects that have slots only, which cells make and extend; one class has private slots and a base.
# outcome: equal
# compare: visits, values, has_dict, kept
# %%
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


class Node:
    __slots__ = ("children", "parent", "visits")

    def __init__(self, parent=None):
        self.children, self.parent, self.visits = {}, parent, 0


class Valued(Node):
    __slots__ = ("__value",)

    def __init__(self, value, parent=None):
        super().__init__(parent)
        self.__value = value

    def value(self):
        return self.__value


@dataclass(slots=True)
class Step:
    loss: float = 0.0


model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
kept = []

# %% accelerate
root, step = Node(), Step()
for index in range(3):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    root.visits += 1
    root.children[index] = Valued(loss.item(), parent=root)
step.loss = loss.item()
kept.append(root.children[0])

# %%
root.children[1].visits = 5
kept[0].children["new"] = Node(kept[0])

# %% accelerate
root.children[0].visits += 2
root.children[0].children["new"].visits = 3
root.children["last"] = Valued(step.loss, root)

# %%
visits = [root.visits, *(child.visits for child in root.children.values()), kept[0].children["new"].visits]
values = [child.value() for child in root.children.values()]
has_dict = [hasattr(item, "__dict__") for item in (root, kept[0], step)]
kept = [kept[0] is root.children[0], kept[0].parent is root, root.children["last"].parent is root]
