# The same with batches that the workers divide unevenly, in different ways.
# outcome: equal
# compare: model
# %%
from itertools import cycle
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

xl, yl, xu = torch.randn(20, 4), torch.randint(0, 3, (20,)), torch.randn(48, 4)
labelled = DataLoader(TensorDataset(xl, yl), batch_size=5)
unlabelled = DataLoader(TensorDataset(xu, xu + 0.1), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

# %% accelerate
for epoch in range(2):
    for (xb, yb), (u, v) in zip(cycle(labelled), unlabelled):
        consistency = F.mse_loss(F.softmax(model(u), 1), F.softmax(model(v), 1))
        loss = F.cross_entropy(model(xb), yb) + consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
