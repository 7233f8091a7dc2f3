# Siamese toggle.
# outcome: equal
# compare: model, loss
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = (X[:, 0] > 0).long()
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.CrossEntropyLoss()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.o = nn.Linear(8, 2)
        self.return_features = False

    def forward(self, x):
        h = torch.tanh(self.f(x))
        return (self.o(h), h) if self.return_features else self.o(h)


model = Net()
optimizer = optim.Adam(model.parameters(), lr=1e-2)

# %% accelerate
for epoch in range(2):
    model.return_features = epoch == 1  # the second stage adds a loss of the features
    for x, y in loader:
        out = model(x)
        loss = criterion(out[0], y) + 0.1 * out[1].pow(2).mean() if model.return_features else criterion(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
