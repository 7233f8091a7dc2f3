# Loss divided by its running mean, read by worker processes.
# outcome: equal
# compare: model, running
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
running = 1.0

# %% accelerate
for epoch in range(3):
    for x, y in loader:
        loss = criterion(model(x), y)
        running = 0.9 * running + 0.1 * loss.item()  # normalize the loss by its running mean
        optimizer.zero_grad()
        (loss / running).backward()
        optimizer.step()
print("done")
