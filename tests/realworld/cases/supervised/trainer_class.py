# A small Trainer class with fit, train_epoch, validate, a history dict, callbacks and checkpoints inside the loop.
# outcome: equal
# compare: trainer.model, trainer.history['val_loss'], saved['epoch'], saved['model']
# share: trainer.history['loss']
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, optimizer, criterion, device="cpu", callbacks=()):
        self.model = model.to(device)
        self.optimizer, self.criterion, self.device = optimizer, criterion, device
        self.callbacks = list(callbacks)
        self.history = {"loss": [], "val_loss": []}

    def train_epoch(self, loader):
        self.model.train()
        total, count = 0.0, 0
        for x, y in loader:
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            total += loss.item() * x.size(0)
            count += x.size(0)
        return total / count

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        total = 0.0
        for x, y in loader:
            total += self.criterion(self.model(x), y).item() * len(x)
        return total / len(loader.dataset)

    def fit(self, train_loader, val_loader, epochs):
        for epoch in range(epochs):
            self.history["loss"].append(self.train_epoch(train_loader))
            self.history["val_loss"].append(self.validate(val_loader))
            for callback in self.callbacks:
                callback(self, epoch)
        return self


def save_checkpoint(trainer, epoch):
    torch.save({"epoch": epoch, "model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, "last.pt")


x = torch.randn(70, 6)
y = torch.sin(x.sum(1, keepdim=True))
train_loader = DataLoader(TensorDataset(x[:50], y[:50]), batch_size=12, shuffle=True, drop_last=False)
val_loader = DataLoader(TensorDataset(x[50:], y[50:]), batch_size=7)
net = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 1))

# %% accelerate
trainer = Trainer(net, torch.optim.AdamW(net.parameters(), lr=0.01), nn.MSELoss(), callbacks=[save_checkpoint])
trainer.fit(train_loader, val_loader, epochs=3)

# %%
saved = torch.load("last.pt")
