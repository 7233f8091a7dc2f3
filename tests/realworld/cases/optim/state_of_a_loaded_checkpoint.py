# An optimizer loads a checkpoint whose tensors it then trains with, as torch loads state; training goes on.
# outcome: equal
# compare: losses, model, optimizer, steps
# %%

import torch
import torch.nn as nn

X, Y = torch.randn(32, 4), torch.randn(32, 1)
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
losses, steps = [], []


def train(number):
    for _ in range(number):
        loss = (model(X) - Y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# %% accelerate
train(2)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
train(2)

# %% accelerate
checkpoint = torch.load("checkpoint.pt")
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])

# %% accelerate
train(2)

# %%
steps.append(optimizer.state[model.weight]["step"].item())
train(1)

# %% accelerate
train(1)
steps.append(optimizer.state[model.weight]["step"].item())
