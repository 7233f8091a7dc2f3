# Helpers from training scripts, which gather from all processes where there are several.
# outcome: equal
# compare: losses, seen, rate, averaged, sampled, whole
# %%
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import is_initialized
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

data = TensorDataset(torch.randn(34, 6), torch.randint(0, 3, (34,)))
model = nn.Linear(6, 3)


def world_size():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Averaged:
    """An average over the processes, as in torchvision's examples."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total += value
        self.count += 1

    def share(self):
        if not is_initialized():
            return
        both = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(both)
        self.total, self.count = both[0].item(), int(both[1].item())


def make_loader():
    sampler = DistributedSampler(data) if is_initialized() else RandomSampler(data)
    return DataLoader(data, batch_size=10, sampler=sampler), type(sampler).__name__


# %% accelerate
rate = 0.1 * world_size()
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
loader, sampled = make_loader()
averaged, losses, seen = Averaged(), [], 0
for epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        averaged.update(loss.item())
        seen += len(x) * world_size()
averaged.share()
averaged = averaged.total, averaged.count

# %%
whole = world_size()
