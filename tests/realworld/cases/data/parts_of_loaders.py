# Cells that name a loader only change its dataset, its sampler and its collate function, with and without names.
# outcome: equal
# compare: data.negatives, data.reads, data.marks, order.epoch, order.log, lengths, unnamed, trained, loss
# %%
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset


class Pairs(Dataset):
    """as the data of NCF notebooks: the loop draws its negatives anew in each epoch"""

    def __init__(self):
        self.x, self.negatives, self.reads, self.marks = torch.randn(32, 4), None, 0, torch.zeros(32)

    def draw(self):
        self.negatives = np.random.randint(0, 32, 32).tolist()

    def __len__(self):
        return 32

    def __getitem__(self, i):
        self.reads += 1
        self.marks[i] += 1
        return self.x[i], self.x[self.negatives[i]].sum().view(1)


class Order(Sampler):
    def __init__(self, size):
        self.size, self.epoch, self.log = size, 0, []

    def __len__(self):
        return self.size

    def __iter__(self):
        self.epoch += 1
        self.log.append(self.epoch)
        return iter(torch.randperm(self.size).tolist())


class Collate:
    def __init__(self):
        self.lengths = []

    def __call__(self, samples):
        self.lengths.append(len(samples))
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


class Trainer:
    def __init__(self):
        self.loader = DataLoader(Subset(Pairs(), range(16)), batch_size=8)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def epoch(self):
        self.loader.dataset.dataset.draw()
        for x, y in self.loader:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()


data = Pairs()
order, collate = Order(24), Collate()
loader = DataLoader(Subset(data, range(24)), batch_size=8, sampler=order, collate_fn=collate)
other = DataLoader(Pairs(), batch_sampler=[[0, 1], [2, 3]])
trainer = Trainer()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for _epoch in range(2):
    loader.dataset.dataset.draw()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
other.dataset.draw()
other.batch_sampler.append([4, 5])
for x, y in other:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
trainer.epoch()

# %%
assert (loader.dataset.dataset, loader.sampler, loader.collate_fn) == (data, order, collate)
seen = data.reads
data.reads, order.epoch = 0, 10
other.dataset.negatives = [0] * 32

# %% accelerate
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
for x, y in other:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
epoch = trainer.epoch
epoch()

# %%
lengths = [seen, *collate.lengths]
unnamed = [other.dataset.negatives, other.dataset.reads, other.batch_sampler]
trained = [trainer.loader.dataset.dataset.negatives, trainer.loader.dataset.dataset.reads]
