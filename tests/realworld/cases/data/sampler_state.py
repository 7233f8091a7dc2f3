# Sampler state.
# outcome: equal
# compare: model, loss
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Sampler, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)


class Curriculum(Sampler):
    """easy samples first; the loop reads which stage was drawn"""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        self.order = torch.randperm(64 + 32 * self.epoch)[:96]
        return iter(self.order.tolist())

    def __len__(self):
        return 96


sampler = Curriculum()
loader = DataLoader(TensorDataset(X, Y), batch_size=32, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
seen = torch.zeros(128)

# %% accelerate
for epoch in range(2):
    for b, (x, y) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / sampler.epoch
        seen[sampler.order[b * 32 : (b + 1) * 32]] += 1
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    print(epoch, sampler.epoch, loss.item())
