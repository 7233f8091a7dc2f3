# Python's profiler runs around training, as an object and as the magic %prun; a step is profiled in the notebook too.
# outcome: equal
# compare: model, losses, found
# %%
import cProfile
import pstats

import torch
import torch.nn as nn
import torch.nn.functional as F

x, y = torch.randn(32, 5), torch.randint(0, 2, (32,))
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []


def step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


def calls_of(profiler, function):  # libraries have functions of the same name, which training may call more often
    code = function.__code__
    stats = pstats.Stats(profiler).stats.items()
    return [stat[1] for place, stat in stats if place == (code.co_filename, code.co_firstlineno, code.co_name)]


# %% accelerate
profiler = cProfile.Profile()
profiler.enable()
for _ in range(3):
    step()
profiler.disable()
found = calls_of(profiler, step)
del profiler

# %%
with cProfile.Profile() as profiler:
    step()
found += calls_of(profiler, step)
del profiler

# %% accelerate
%prun -q -r step()
step()
