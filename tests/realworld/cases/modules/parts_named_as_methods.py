# Parts of a module that have the names of methods, and an optimizer that the module keeps: N-BEATS networks do both.
# outcome: equal
# compare: list(nn.Module.parameters(net)), net.history, len(net.optimizer.param_groups[0]["params"]), net.last is net._modules["half"]
# %%
import torch
from torch import nn


def part(module, name):
    return module._modules[name]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.half = nn.Linear(4, 8)
        self.parameters = nn.ParameterList([nn.Parameter(torch.randn(8, 2))])
        self.history = []

    def forward(self, x):
        return torch.relu(part(self, "half")(x)) @ part(self, "parameters")[0]

    def fit(self, x, y, steps):
        self.optimizer = torch.optim.Adam(nn.Module.parameters(self), lr=1e-2)
        self.last = part(self, "half")
        for _ in range(steps):
            loss = nn.functional.cross_entropy(self(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.history.append(loss.item())


net = Net()
x, y = torch.randn(20, 4), torch.randint(0, 2, (20,))

# %% accelerate
net.fit(x, y, 3)
net.fit(x, y, 2)
