# A default argument is one layer in three models, one of which contains another: a cell trains the third one.
# outcome: equal
# compare: modes, model, other
# %%
import torch
import torch.nn as nn


class Noise(nn.Module):
    def __init__(self, constraint=nn.Softplus()):
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(1))
        self.constraint = constraint

    def forward(self, x):
        return x * self.constraint(self.raw)


class Model(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.noise, self.layer = noise, nn.Linear(3, 1)

    def forward(self, x):
        return self.noise(self.layer(x))


torch.manual_seed(0)
noise, other, x = Noise(), Noise(), torch.randn(8, 3)
model = Model(noise)

# %% accelerate
model.train(), noise.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()

# %%
model.eval()
with torch.no_grad():
    model.layer.bias.fill_(3.0)

# %% accelerate
other.train()
second = torch.optim.SGD(other.parameters(), lr=0.1)
for _ in range(2):
    second.zero_grad()
    other(x).pow(2).mean().backward()
    second.step()

# %%
modes = [model.training, noise.training, other.training]
