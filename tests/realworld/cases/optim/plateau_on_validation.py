# ReduceLROnPlateau by the validation loss.
# outcome: equal
# compare: model, rates
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(40, 3)
y = torch.randn(40, 1)
train_loader = DataLoader(TensorDataset(x[:30], y[:30]), batch_size=7)
valid_loader = DataLoader(TensorDataset(x[30:], y[30:]), batch_size=5)
model = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
criterion = nn.L1Loss()

# %% accelerate
rates = []
for epoch in range(6):
    model.train()
    for xb, yb in train_loader:
        optimizer.zero_grad()
        criterion(model(xb), yb).backward()
        optimizer.step()
    model.eval()
    total = 0.0
    for xb, yb in valid_loader:
        with torch.no_grad():
            total += criterion(model(xb), yb).item()
    scheduler.step(total / len(valid_loader))
    rates.append(optimizer.param_groups[0]["lr"])
