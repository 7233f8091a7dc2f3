# A metaclass lists its classes and keeps the only instance of each, as configurations and logs have it.
# outcome: equal
# compare: Log().losses, Single.made, Log() is first, model
# %%
import torch
from torch import nn


class Single(type):
    instances, made = {}, []

    def __new__(metaclass, name, bases, members):
        metaclass.made.append(name)
        return super().__new__(metaclass, name, bases, members)

    def __call__(cls, *arguments):
        if cls not in cls.instances:
            cls.instances[cls] = super().__call__(*arguments)
        return cls.instances[cls]


class Log(metaclass=Single):
    def __init__(self):
        self.losses = []


first = Log()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(24, 4), torch.randn(24, 1)

# %% accelerate
class Quiet(Log):
    pass


for rows in torch.arange(24).split(8):
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    Log().losses.append(loss.item())
