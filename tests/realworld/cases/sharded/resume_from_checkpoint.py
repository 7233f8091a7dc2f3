# Weights and optimizer state of a sharded model are saved with torch.save, and loaded into a new model.
# outcome: equal
# runs: always
# compare: model, optimizer, start_epoch
# %%
import os
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(48, 5)
y = torch.randint(0, 3, (48,))
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)


def make():
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return model, optimizer, scheduler

# %% accelerate --strategy fsdp
def train(model, optimizer, scheduler, start_epoch, epochs):
    for epoch in range(start_epoch, epochs):
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        checkpoint = {
            "epoch": epoch + 1,
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "scheduler_state_dict": scheduler.state_dict(),
        }
        torch.save(checkpoint, f"checkpoint_{epoch}.pth")


model, optimizer, scheduler = make()
train(model, optimizer, scheduler, 0, 2)

# %% accelerate --strategy fsdp
model, optimizer, scheduler = make()
latest = sorted(name for name in os.listdir(".") if name.endswith(".pth"))[-1]
checkpoint = torch.load(latest, weights_only=True)
model.load_state_dict(checkpoint["model_state_dict"])
optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
start_epoch = checkpoint["epoch"]
train(model, optimizer, scheduler, start_epoch, 4)
