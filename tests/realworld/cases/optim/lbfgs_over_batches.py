# LBFGS in a loop over a loader: a closure for each batch.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(45, 3)
y = x.pow(2).sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=20)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3, history_size=5)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(xb), yb)
            loss.backward()
            return loss
        optimizer.step(closure)
