# Raw tensors in torch.optim.SGD([w, b]), batches from a loader.
# outcome: equal
# compare: w, b
# %%
import torch
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(50, 3)
Y = X @ torch.tensor([[1.0], [2.0], [3.0]]) - 0.5
loader = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)
w = torch.randn(3, 1, requires_grad=True)
b = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([w, b], lr=0.05)

# %% accelerate
for epoch in range(4):
    for xb, yb in loader:
        loss = (xb @ w + b - yb).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
