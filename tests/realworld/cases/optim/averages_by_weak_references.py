# Averages of weights by an object that has weak references to the parameters, as torch_ema has; the notebook continues them.
# outcome: equal
# compare: net, average.shadow, average.num_updates, average.references[0]() is net[0].weight, losses
# %%
import weakref

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Average:
    def __init__(self, parameters, decay):
        parameters = list(parameters)
        self.decay, self.num_updates = decay, 0
        self.shadow = [parameter.detach().clone() for parameter in parameters]
        self.references = [weakref.ref(parameter) for parameter in parameters]

    def update(self):
        self.num_updates += 1
        with torch.no_grad():
            for shadow, reference in zip(self.shadow, self.references, strict=True):
                shadow.lerp_(reference(), 1 - self.decay)


net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
average = Average(net.parameters(), 0.9)
inputs = torch.randn(50, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8, shuffle=True)
losses = []


def train():
    for x, t in loader:
        loss = (net(x) - t).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update()
        losses.append(loss.item())


# %% accelerate
train()

# %%
average.update()

# %% accelerate
train()
