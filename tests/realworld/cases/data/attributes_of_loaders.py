# Attributes of data loaders, which the notebook, a subclass and cells set.
# outcome: equal
# compare: loader.passes, loader.seen, loader.tag, held, trainer.loader.passes, tags, model
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Counting(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passes, self.seen = 0, []

    def __iter__(self):
        self.passes += 1
        self.seen.append(self.passes)
        return super().__iter__()


class Trainer:
    def __init__(self, loader):
        self.loader = loader

    def epoch(self):
        for x, y in self.loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = Counting(data, batch_size=8)
loader.tag, held = 5, loader.seen
trainer = Trainer(Counting(data, batch_size=16))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
loader.tag += epoch
trainer.epoch()

# %%
tags = [loader.tag]
loader.tag += 10
trainer.loader.passes += 10

# %% accelerate
trainer.epoch()
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
loader.tag += 1
tags.append(loader.tag)
