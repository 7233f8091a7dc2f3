# Functions of random and numpy.random that were imported by name, and the generators that they draw from.
# outcome: equal
# compare: model, losses, drawn, own.random(), random.random(), np.random.rand(), torch.rand(()), same
# runs: always
# %%
import random
from random import choice, randint
from random import random as draw

import numpy as np
import torch
import torch.nn as nn
from numpy.random import rand
from torch.utils.data import DataLoader

own = random.Random(3)  # another object of the same class is the user's
noise = np.random.mtrand._rand  # what sklearn's check_random_state(None) returns
generator = torch.default_generator
rows = torch.randn(24, 4)


class Jittered:
    def __len__(self):
        return len(rows)

    def __getitem__(self, index):
        return rows[index] * rand() + rows[randint(0, 23)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        guess = 0
        if draw() < 0.5:
            with torch.no_grad():
                guess = self.layer(x)
        return (self.layer(x + guess) - x).pow(2).mean()


loader = DataLoader(Jittered(), batch_size=4, shuffle=True)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses, drawn = [], []

# %% accelerate
for x in loader:
    loss = model(x)
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    drawn += [choice([1, 2, 3]), own.random(), noise.normal(), torch.rand((), generator=generator).item()]

# %%
drawn += [rand(), randint(0, 1000), draw()]
same = [randint.__self__ is random.random.__self__, generator is torch.default_generator]

# %% accelerate
drawn += [rand(), randint(0, 1000), draw()]
