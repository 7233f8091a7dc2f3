# A model that standardizes the targets of its batch and returns its loss.
# outcome: equal
# compare: model, loss
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 6)
Y = X @ torch.randn(6, 1)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
class M(nn.Module):
    """predicts standardized targets; returns the loss"""
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    def forward(self, x, y):
        p = self.f(x)
        y = (y - y.mean()) / y.std()
        return F.mse_loss(p, y)
model = M()
optimizer = optim.SGD(model.parameters(), lr=0.1)


# %% accelerate
for epoch in range(4):
    for x, y in loader:
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
