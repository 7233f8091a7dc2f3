# Early stopping by the training loss, read by worker processes.
# outcome: equal
# compare: model, best, bad, epoch
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 6)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = optim.SGD(model.parameters(), lr=0.02)
criterion = nn.MSELoss()
best, patience, bad = float("inf"), 1, 0

# %% accelerate
for epoch in range(12):
    total = 0.0
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if total < best - 2.0:
        best, bad = total, 0
    else:
        bad += 1
        if bad >= patience:
            break
print("stopped", epoch)
