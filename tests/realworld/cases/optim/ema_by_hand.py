# An exponential moving average of the weights in a class of one's own, applied for the evaluation and taken back.
# outcome: equal
# compare: model, ema.shadow, val_losses
# %%
import copy
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}
        self.backup = {}

    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].mul_(self.decay).add_(p.data, alpha=1 - self.decay)

    def apply(self, model):
        self.backup = {name: p.data.clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.data.copy_(self.shadow[name])

    def restore(self, model):
        for name, p in model.named_parameters():
            p.data = self.backup[name]


x = torch.randn(40, 3)
y = torch.cos(x).sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x[:30], y[:30]), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
ema = EMA(model, 0.9)

# %% accelerate
val_losses = []
for epoch in range(3):
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
    ema.apply(model)
    with torch.no_grad():
        val_losses.append(nn.functional.mse_loss(model(x[30:]), y[30:]).item())
    ema.restore(model)
