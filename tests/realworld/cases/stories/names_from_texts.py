# Classes and functions are found by texts: globals()[...], eval of a configured name, the module's attributes.
# outcome: equal
# compare: built.model, skipped, other
# %%
import sys
import torch
import torch.nn as nn


class SmallNet(nn.Linear):
    pass


class WideNet(nn.Linear):
    pass


class SkipStep(Exception):
    pass


def squared(a, b):
    return (a - b).pow(2).mean()


def guarded(kind):
    def decorate(function):
        def call(*args):
            try:
                return function(*args)
            except globals()[f"Skip{kind}"]:
                skipped.append(kind)

        return call

    return decorate


class Built:
    def __init__(self, size, loss):
        self.model = globals()[size + "Net"](3, 1)
        self.loss = eval(loss)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @guarded("Step")
    def step(self, number):
        if number == 1:
            raise SkipStep
        loss = self.loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


x, y = torch.randn(16, 3), torch.randn(16, 1)
skipped = []
loss_name = "squared"

# %% accelerate
built = Built("Small", loss_name)
for number in range(3):
    built.step(number)

# %% accelerate
other = type(getattr(sys.modules[__name__], "Wide" + "Net")(3, 1)).__name__
built.step(3)
