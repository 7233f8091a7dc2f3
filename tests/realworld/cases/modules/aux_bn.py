# Aux bn.
# outcome: equal
# compare: model
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 10)
Y = torch.randint(0, 2, (128,))
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)


class DSBN(nn.Module):
    """source samples in the first half of a batch, target samples in the second"""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 8, bias=False)  # the norm would cancel it, and Adam follow its rounding
        self.bn_s = nn.BatchNorm1d(8)
        self.bn_t = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        h = self.fc(x)
        if self.training:
            s, t = h.chunk(2)
            h = torch.cat([self.bn_s(s), self.bn_t(t)])
        else:
            h = self.bn_t(h)
        return self.out(F.relu(h))


model = DSBN()
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
