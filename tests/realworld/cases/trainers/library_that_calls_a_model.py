# A library, as a solver of differential equations, calls the model; gradients are cleared after it, in a function.
# outcome: equal
# compare: field, losses, predictions
# %%
import importlib
import sys
from pathlib import Path

import torch
import torch.nn as nn

Path("site-packages").mkdir()
Path("site-packages/tinysolver.py").write_text("""
def solve(field, start, times):
    states = [start]
    for before, after in zip(times[:-1], times[1:]):
        states.append(states[-1] + (after - before) * field(before, states[-1]))
    return states


class Solver:
    def __init__(self, field):
        self.field = field

    def fit(self, step, batches):
        return [step(self, batch) for batch in batches]
""")
sys.path.insert(0, "site-packages")
sys.modules.pop("tinysolver", None)
importlib.invalidate_caches()
from tinysolver import Solver, solve


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))

    def forward(self, time, state):
        return self.net(state**3)


times = torch.linspace(0, 1, 5)
starts = torch.randn(12, 2)
ends = starts @ torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])


def train(num_steps):
    field = Field()
    optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-3)

    def step(solver, rows):
        states = solve(solver.field, starts[rows], times)
        loss = (states[-1] - ends[rows]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = [step(Solver(field), rows) for rows in torch.randperm(12).split(6)]
    losses += Solver(field).fit(step, torch.randperm(12).split(4) * num_steps)
    return field, losses


# %% accelerate
field, losses = train(2)
with torch.no_grad():
    predictions = torch.stack(solve(field, starts, times))
