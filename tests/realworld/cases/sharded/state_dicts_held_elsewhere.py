# Values of state dicts and ``.data`` that objects of earlier cells hold are averaged, shrunk and read under FSDP, in two cells.
# outcome: equal
# compare: model, average, history, shares, held["0.bias"]
# %%
import torch
from torch import nn


class WeightAverage:
    def __init__(self, model, average, decay):
        self.decay = decay
        self.values = list(model.state_dict().values())
        self.averages = tuple(average.state_dict().values())

    def step(self):
        for value, average in zip(self.values, self.averages):
            if average.is_floating_point():
                average.mul_(self.decay)
                average.add_(value * (1 - self.decay))
                value.mul_(0.98)


def make():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def make_penalty(model):
    weight = model[3].weight.data
    return lambda: weight.abs().sum().item()


model, average = make(), make()
for parameter in average.parameters():
    parameter.detach_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weight_average = WeightAverage(model, average, 0.9)
penalty = make_penalty(model)
held = {name: value.data for name, value in model.named_parameters()}
x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
history = []

# %% accelerate --strategy fsdp
for _ in range(3):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    weight_average.step()
    history.append((loss.item(), penalty()))
held["0.bias"].fill_(0.5)
is_filled = True

# %%
history.append((model[0].bias.sum().item(), penalty()))
held["3.bias"].add_(1.0)

# %% accelerate --strategy fsdp
for _ in range(2):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    weight_average.step()
    history.append((loss.item(), penalty(), held["3.bias"].norm().item()))

# %%
shares = [value.data_ptr() == held[name].data_ptr() for name, value in model.named_parameters()]
