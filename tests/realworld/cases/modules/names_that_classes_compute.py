# Losses and metrics whose `__name__` is a property or text of the class body, as libraries for segmentation have them.
# outcome: equal
# compare: model, logs, names
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Named(nn.Module):
    @property
    def __name__(self):
        return type(self).__name__.lower()


class DiceLoss(Named):
    def forward(self, predicted, true):
        overlap = (predicted * true).sum()
        return 1 - (2 * overlap + 1) / (predicted.sum() + true.sum() + 1)


class Entropy(nn.BCELoss):
    __name__ = "bce"


images = torch.rand(20, 1, 6, 6)
loader = DataLoader(TensorDataset(images, (images > 0.6).to(images.dtype)), batch_size=6, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1), nn.Sigmoid())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = [DiceLoss(), Entropy()]
logs = []

# %% accelerate
for x, y in loader:
    predicted = model(x)
    parts = {loss.__name__: loss(predicted, y) for loss in losses}
    optimizer.zero_grad()
    sum(parts.values()).backward()
    optimizer.step()
    logs.append({name: part.item() for name, part in parts.items()})

# %%
names = [DiceLoss.__name__, Entropy.__name__, losses[0].__name__, losses[1].__name__]
