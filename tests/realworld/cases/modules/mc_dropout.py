# Mc dropout.
# outcome: equal
# compare: samples, mean, std
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
X_test = torch.randn(40, 4)


def enable_dropout(m):
    for part in m.modules():
        if isinstance(part, nn.Dropout):
            part.train()


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

model.eval()
with torch.no_grad():
    pred = model(X_test)
    enable_dropout(model)
    samples = torch.stack([model(X_test) for _ in range(10)])
mean, std = samples.mean(0), samples.std(0)
print("uncertainty", round(std.mean().item(), 4), "error", round((mean - pred).abs().mean().item(), 4))
