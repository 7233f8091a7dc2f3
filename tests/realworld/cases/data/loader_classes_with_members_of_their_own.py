# Loader classes whose iteration is a map over torch's, two of which are read together; own attributes, own set_epoch.
# outcome: equal
# compare: model, seen
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Doubled(DataLoader):
    def __iter__(self):
        return map(lambda batch: 2 * batch[0], super().__iter__())


class Shifted(Dataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor([index + 20.0 * self.epoch])


class Alternating(DataLoader):
    def set_epoch(self, epoch):
        self.dataset.set_epoch(epoch % 2)


x = torch.arange(16.0)[:, None]
first, second = (Doubled(TensorDataset(x + shift), batch_size=4, shuffle=True) for shift in (0, 50))
alternating = Alternating(Shifted(), batch_size=4)
first.remainder, second.total_batch_size = "mine", 77
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
seen = []


def step(inputs, targets):
    seen.append((inputs.flatten().tolist(), targets.flatten().tolist()))
    optimizer.zero_grad()
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()


# %% accelerate
for epoch in range(3):
    for one, other in zip(first, second):
        step(one, other)
    alternating.set_epoch(epoch)
    for batch in alternating:
        step(batch, batch)
    seen.append((first.remainder, second.total_batch_size))
    first.remainder = epoch
