# Unused first clamp.
# outcome: equal
# compare: model, norms, loss
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.MSELoss()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.o = nn.Linear(8, 1)
        self.unused = nn.Linear(8, 2)

    def forward(self, x):
        return self.o(torch.tanh(self.f(x)))


model = Net()
optimizer = optim.SGD(model.parameters(), lr=1e-1)
norms = []

# %% accelerate
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    norms.append(sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.clamp_(-0.05, 0.05)
    optimizer.step()
print(norms)
