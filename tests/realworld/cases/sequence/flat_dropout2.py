# Flat dropout2.
# outcome: equal
# compare: model, loss, losses
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 6, 4)
Y = torch.randint(0, 3, (128, 6))
loader = DataLoader(TensorDataset(X, Y), batch_size=64, shuffle=True)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 32)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(32, 3)

    def forward(self, x):
        h = self.drop(torch.relu(self.f(x)).reshape(-1, 32))
        return self.fc(h).view(x.size(0), x.size(1), 3)


model = Tagger()
optimizer = optim.Adam(model.parameters(), lr=1e-2)


def criterion(out, y):
    return F.cross_entropy(out.reshape(-1, 3), y.reshape(-1))


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
