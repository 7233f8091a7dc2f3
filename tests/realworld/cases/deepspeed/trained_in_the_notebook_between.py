# The notebook trains between two cells on workers, and a cell loads a saved state: the optimizer continues from it.
# outcome: equal
# compare: states, weights
# needs: deepspeed
# %%
import copy

import torch
from torch import nn

torch.set_default_dtype(torch.float32)
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
x, y = torch.randn(16, 4), torch.randn(16, 1)
states, weights = [], []


def train(number):
    for _ in range(number):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def keep():
    states.append(copy.deepcopy(optimizer.state_dict()["state"]))
    weights.append(model.weight.detach().clone())


# %% accelerate --strategy deepspeed
train(2)
torch.save(optimizer.state_dict(), "optimizer.pt")

# %%
keep()
train(3)

# %% accelerate --strategy deepspeed
train(4)

# %%
keep()

# %% accelerate --strategy deepspeed
optimizer.load_state_dict(torch.load("optimizer.pt"))

# %%
keep()

# %% accelerate --strategy deepspeed
train(2)

# %%
keep()
states = [[round(float(value), 4) for value in state[0]["exp_avg"][0]] + [float(state[0]["step"])] for state in states]
weights = [[round(float(value), 4) for value in weight[0]] for weight in weights]
