# A model with synchronized batch normalization, as of a script for many GPUs; one is converted in the cell.
# outcome: equal
# compare: other
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(34, 6), torch.randint(0, 3, (34,))
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# %% accelerate
def train(model, optimizer):
    for epoch in range(2):
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


train(model, optimizer)
model.eval()
with torch.no_grad():
    correct = sum((model(xb).argmax(1) == yb).sum().item() for xb, yb in loader)
other = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
other = nn.SyncBatchNorm.convert_sync_batchnorm(other)
train(other, torch.optim.SGD(other.parameters(), lr=0.1))
