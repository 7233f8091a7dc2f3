# Stream state.
# outcome: equal
# compare: x, y, losses, loss
# %%

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, IterableDataset


class Replay:
    def __init__(self):
        self.data = [torch.randn(4) for _ in range(64)]
        self.served = 0


class ReplayStream(IterableDataset):
    """as PyTorch Lightning's RLDataset: samples the buffer while the loop adds to it"""

    def __init__(self, buffer):
        self.buffer = buffer

    def __iter__(self):
        for _ in range(160):
            self.buffer.served += 1
            x = self.buffer.data[np.random.randint(len(self.buffer.data))]
            yield x, x.sum().view(1)


replay = Replay()
loader = DataLoader(ReplayStream(replay), batch_size=16)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
losses = []

# %% accelerate
for x, y in loader:
    with torch.no_grad():
        replay.data += [torch.full((4,), float(model(x).mean())) for _ in range(8)]  # new experience
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses[-1], replay.served)
