# A moving average whose class decides in `__new__`, which needs an argument, what to make.
# outcome: equal
# compare: losses, model, average, average.model
# %%

import copy

import torch
import torch.nn as nn

X, Y = torch.randn(32, 4), torch.randn(32, 1)


class Average(nn.Module):
    def __new__(cls, model, decay=0.9):
        if not isinstance(model, nn.Module):
            raise TypeError("not a module")
        return super().__new__(cls)

    def __init__(self, model, decay=0.9):
        super().__init__()
        self.model, self.decay = copy.deepcopy(model), decay
        self.register_buffer("num_updates", torch.zeros(()))

    @torch.no_grad()
    def update(self, model):
        self.num_updates += 1
        for own, other in zip(self.model.parameters(), model.parameters()):
            own.lerp_(other, 1 - self.decay)


model = nn.Linear(4, 1)
average = Average(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []

# %% accelerate
for _ in range(3):
    loss = (model(X) - Y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model)
    losses.append(loss.item())

# %%
average.update(model)

# %% accelerate
average.update(model)
other = Average(model, 0.5)
other.update(average.model)
