# Models made in the cell on the meta device, which get the weights of a checkpoint file, or memory and new weights.
# outcome: equal
# compare: model, twin, blank, losses, kinds
# runs: always
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 4), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


def make():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def train(model, optimizer):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


model, losses = make(), []
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# %% accelerate
train(model, optimizer)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "weights.pt")
with torch.device("meta"):
    twin, blank = make(), make()
    kinds = [torch.zeros(2).device.type, blank[0].weight.device.type]
states = torch.load("weights.pt", mmap=True, weights_only=True)
twin.load_state_dict(states["model"], assign=True)
optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
optimizer.load_state_dict(states["optimizer"])
train(twin, optimizer)
blank.to_empty(device="cpu")
for part in blank:
    if isinstance(part, nn.Linear):
        part.reset_parameters()
train(blank, torch.optim.SGD(blank.parameters(), lr=0.1))
del states
