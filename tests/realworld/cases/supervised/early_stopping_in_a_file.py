# An EarlyStopping class that saves the best weights to a file and loads them again at the end.
# outcome: equal
# compare: model, stopper.best, stopper.counter
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class EarlyStopping:
    def __init__(self, patience=2, path="best.pt"):
        self.patience, self.path = patience, path
        self.counter, self.best, self.stop = 0, None, False

    def __call__(self, value, model):
        if self.best is None or value < self.best:
            self.best, self.counter = value, 0
            torch.save(model.state_dict(), self.path)
        else:
            self.counter += 1
            self.stop = self.counter >= self.patience


x = torch.randn(60, 4)
y = (x[:, 0] > 0).long()
train_loader = DataLoader(TensorDataset(x[:40], y[:40]), batch_size=8, shuffle=True)
val_x, val_y = x[40:], y[40:]
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.02)
criterion = nn.CrossEntropyLoss()
stopper = EarlyStopping()

# %% accelerate
for epoch in range(10):
    model.train()
    for xb, yb in train_loader:
        optimizer.zero_grad()
        criterion(model(xb), yb).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = criterion(model(val_x), val_y).item()
    stopper(val_loss, model)
    if stopper.stop:
        print("stopped early")
        break
model.load_state_dict(torch.load("best.pt"))
