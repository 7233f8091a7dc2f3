# Metrics and a cache that threads may share hold locks and events; a class holds one for all its instances.
# outcome: equal
# compare: metrics.losses, metrics.count, cache, kept, model
# %%
import threading
import torch
from torch import nn


class Metrics:
    all_instances = threading.RLock()

    def __init__(self):
        self.lock, self.finished = threading.Lock(), threading.Event()
        self.losses, self.count = [], 0

    def add(self, loss):
        with self.all_instances, self.lock:
            self.losses.append(loss)
            self.count += 1


cache, cache_lock = {}, threading.Lock()


def remember(key, value):
    with cache_lock:
        cache[key] = value


metrics = Metrics()
before = metrics.lock, metrics.finished, cache_lock
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(24, 4), torch.randn(24, 1)

# %% accelerate
for index, rows in enumerate(torch.arange(24).split(8)):
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    metrics.add(loss.item())
    remember(index, loss.item())
metrics.finished.set()

# %%
metrics.add(0.0)
remember("last", 0.0)
kept = [metrics.finished.is_set(), metrics.lock is before[0], metrics.finished is before[1], cache_lock is before[2]]
