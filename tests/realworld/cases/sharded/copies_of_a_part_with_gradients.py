# A part of a sharded model, and one of its parameters, are copied while they have gradients; the class has its own `parameters`.
# outcome: equal
# compare: model, history
# %%
import copy

import torch
from torch import nn


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(3))])

    def forward(self, x):
        return nn.functional.linear(x, *self.values)

    def parameters(self, recurse=True):
        return iter(self.values)


class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Learner()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)

    def forward(self, x, y):
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def evaluate(self, x, y):
        net, weight = copy.deepcopy(self.net), copy.deepcopy(self.net.values[0])
        with torch.no_grad():
            return nn.functional.cross_entropy(net(x), y).item(), weight.norm().item()


model = Meta()
x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
history = []

# %% accelerate --strategy fsdp
for _ in range(3):
    history.append(model(x, y))
    history.append(model.evaluate(x, y))
