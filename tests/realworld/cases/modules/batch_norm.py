# A small convolutional net with batch normalization.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 1, 6, 6), torch.randint(0, 3, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(4, 3),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
model.train()
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xb), yb).backward()
        optimizer.step()
