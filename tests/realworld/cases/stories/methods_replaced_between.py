# Methods of a model's class and of its base are replaced between cells, plainly and on workers; cells name no class.
# outcome: equal
# compare: model, losses, Scaled.factor
# %%
import torch
import torch.nn as nn


class Scaled(nn.Module):
    factor = 1.0

    @staticmethod
    def distance(a, b):
        return (a - b).pow(2).mean()


class Line(Scaled):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x) * self.factor


x = torch.randn(20, 4)
y = x.sum(1, keepdim=True)
model = Line()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []


def fit(steps):
    for _ in range(steps):
        loss = model.distance(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# %% accelerate
fit(2)

# %%
Scaled.factor = 0.5
Scaled.distance = staticmethod(lambda a, b: (a - b).abs().mean())

# %% accelerate
fit(2)

# %%
Line.forward = lambda self, x: torch.tanh(self.layer(x))

# %% accelerate
fit(2)

# %% accelerate
Line.forward = lambda self, x: self.layer(x - x.mean(0))

# %% accelerate
fit(2)
