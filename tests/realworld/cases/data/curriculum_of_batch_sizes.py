# The loader is built anew in each epoch, with a larger batch and more of the data.
# outcome: equal
# compare: model, sizes
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Subset, TensorDataset

x = torch.randn(60, 4)
y = x.abs().sum(1, keepdim=True)
difficulty = torch.argsort(y.squeeze()).tolist()
dataset = TensorDataset(x, y)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

# %% accelerate
sizes = []
for epoch, (fraction, batch_size) in enumerate([(0.3, 4), (0.6, 8), (1.0, 16)]):
    subset = Subset(dataset, difficulty[: int(fraction * len(dataset))])
    train_loader = DataLoader(subset, batch_size=batch_size, shuffle=True)
    sizes.append(len(train_loader))
    for xb, yb in train_loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
