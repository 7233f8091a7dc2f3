# A trainer and the notebook hold endless generators over loaders, made in an earlier cell: the usual `cycle(loader)`.
# outcome: told was read there
# compare: trainer.losses, losses, steps, model

# %%
import itertools
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.randn(48, 5)
targets = inputs.sum(1, keepdim=True)
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def cycle(loader):
    while True:
        yield from loader


class Trainer:
    def __init__(self, steps):
        self.steps, self.losses = steps, []
        self.batches = cycle(DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True))
        self.others = itertools.cycle(DataLoader(TensorDataset(inputs, targets), batch_size=12))

    def train(self):
        for _ in range(self.steps):
            (x, y), (x2, y2) = next(self.batches), next(self.others)
            loss = (model(x) - y).square().mean() + (model(x2) - y2).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item())


trainer = Trainer(7)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16)
endless, once, losses = cycle(loader), iter(loader), []

# %% accelerate
trainer.train()

# %%
steps = len(trainer.losses)
trainer.steps = 4

# %% accelerate
trainer.train()
for batches in (endless, once, endless):
    x, y = next(batches)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %% accelerate
for batches in (endless, once):
    x, y = next(batches)
    losses.append((model(x) - y).square().mean().item())
