# Gamma zero.
# outcome: equal
# compare: model, optimizer, loss, losses
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 8)
Y = (X[:, 0] > 0).long()
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.CrossEntropyLoss()


class BatchAttention(nn.Module):
    """attention over the samples of a batch, with a gate that begins at zero"""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(8, 16)
        self.q = nn.Linear(16, 16)
        self.k = nn.Linear(16, 16)
        self.gamma = nn.Parameter(torch.zeros(1))
        self.o = nn.Linear(16, 2)

    def forward(self, x):
        h = torch.tanh(self.f(x))
        a = (self.q(h) @ self.k(h).t() / 4).softmax(1)
        return self.o(h + self.gamma * (a @ h))


model = BatchAttention()
optimizer = optim.Adam(model.parameters(), lr=1e-2)

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
