# Global torch gen.
# outcome: equal
# compare: model, losses, drawn
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 10)
Y = (X[:, 0] > 0).long()
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
g = torch.Generator().manual_seed(3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 16)
        self.fc2 = nn.Linear(16, 2)

    def forward(self, x):
        if self.training:
            x = x + 0.2 * torch.randn(x.shape, generator=g)
        return self.fc2(torch.tanh(self.fc1(x)))


model = Net()
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
drawn = torch.rand(3, generator=g)
