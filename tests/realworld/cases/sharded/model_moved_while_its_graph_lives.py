# The model is moved to its device at the start of each cell and epoch, while code still holds the loss and weak references.
# outcome: equal
# compare: model, losses, kept
# %%
import weakref

import torch
import torch.nn as nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LSTM(8, 4))
head = nn.Linear(4, 1)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.01)
x, y = torch.randn(24, 6), torch.randn(24, 1)
references = [weakref.ref(value) for value in model.parameters()]
losses = []


def train_epoch(model, head):
    model.to(device), head.to(device)
    total = 0.0
    for start in range(0, 24, 8):
        loss = nn.functional.mse_loss(head(model(x[start : start + 8])[0]), y[start : start + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        model.to(device)
    return total


# %% accelerate --strategy fsdp
model.to(device)
norms = [value.data.norm().item() for value in model.parameters()]
for _ in range(2):
    losses.append(train_epoch(model, head))

# %%
losses.append(train_epoch(model, head))

# %% accelerate --strategy fsdp
model.to(device), head.double()
losses.append(train_epoch(model, head))
kept = [reference() is value for reference, value in zip(references, model.parameters())]
