# Ghost bn.
# outcome: equal
# compare: model
# %%

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 10)
X[:64] += 2
Y = torch.randint(0, 2, (128,))
loader = DataLoader(TensorDataset(X, Y), batch_size=64, shuffle=True)


class GBN(nn.Module):
    """Ghost Batch Normalization (TabNet)"""

    def __init__(self, input_dim, virtual_batch_size=32, momentum=0.01):
        super().__init__()
        self.input_dim = input_dim
        self.virtual_batch_size = virtual_batch_size
        self.bn = nn.BatchNorm1d(self.input_dim, momentum=momentum)

    def forward(self, x):
        chunks = x.chunk(int(np.ceil(x.shape[0] / self.virtual_batch_size)), 0)
        res = [self.bn(x_) for x_ in chunks]
        return torch.cat(res, dim=0)


# No bias is only cancelled by a norm: Adam would follow its rounding.
model = nn.Sequential(GBN(10), nn.ReLU(), nn.Linear(10, 16, bias=False), GBN(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
