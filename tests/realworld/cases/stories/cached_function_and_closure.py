# The cell binds an lru_cache function, a lambda and a closure beside the trained model.
# outcome: equal
# compare: model, scaled(3), double(4)
# runs: always
# %%
import torch
import torch.nn as nn

x, y = torch.randn(20, 3), torch.randn(20, 1)

# %% accelerate
from functools import lru_cache


@lru_cache(maxsize=None)
def scaled(n):
    return n * 2.5


def make(k):
    return lambda value: value * k


double = make(2)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(double(2))):
    loss = nn.functional.mse_loss(model(x), y) * scaled(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
