# Pruning a model that the cell has trained, and again what the notebook has pruned; the masks are made permanent.
# outcome: told model is a new object
# compare: losses, weight, mask, out
# %%
import torch
import torch.nn as nn
import torch.nn.utils.prune as prune

x, y = torch.randn(32, 4), torch.randn(32, 1)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
prune.l1_unstructured(model[2], "weight", amount=0.3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []


def train():
    for step in range(3):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# %% accelerate --strategy fsdp
train()
prune.l1_unstructured(model[0], "weight", amount=0.3)
train()
prune.random_unstructured(model[2], "weight", amount=0.2)
train()
prune.remove(model[2], "weight")
train()

# %%
weight, mask = model[0].weight_orig, model[0].weight_mask
out = model(x).detach()
