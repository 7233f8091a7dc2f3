# The whole model is saved with torch.save in a training cell, and loaded in a plain one.
# outcome: equal
# compare: model, loaded, type(loaded).__name__, prediction
# runs: always
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x)


x = torch.randn(30, 3)
y = x.prod(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=10)
model = Regressor()
optimizer = torch.optim.Adam(model.parameters())

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = ((model(xb) - yb) ** 2).mean()
        loss.backward()
        optimizer.step()
    with open("model.pt", "wb") as f:
        torch.save(model, f)

# %%
loaded = torch.load("model.pt", weights_only=False)
prediction = loaded(x).detach()
