# A sampler weighted by the last losses, built anew for each epoch with worker processes.
# outcome: equal
# compare: model, weights
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

X = torch.randn(512, 6)
Y = X.sum(1, keepdim=True)


class D(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, i):
        return X[i], Y[i], i


data = D()
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = optim.SGD(model.parameters(), lr=0.05)
weights = torch.ones(512)

# %% accelerate
for epoch in range(3):
    loader = DataLoader(data, batch_size=32, sampler=WeightedRandomSampler(weights, 512), num_workers=2)
    for x, y, i in loader:
        each = ((model(x) - y) ** 2).squeeze(1)
        loss = each.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights[i] = each.detach() + 0.1
print("done")
