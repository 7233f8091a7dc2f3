# Transfer learning: the backbone is frozen, the head trained; then unfrozen with a smaller rate in groups.
# outcome: equal
# compare: net
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(self.backbone(x))


images, labels = torch.randn(36, 1, 6, 6), torch.randint(0, 2, (36,))
loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
net = Net()
for param in net.parameters():
    param.requires_grad = False
net.fc = nn.Linear(net.fc.in_features, 2)
optimizer = torch.optim.SGD(net.fc.parameters(), lr=0.1)


def fit(optimizer, epochs):
    for epoch in range(epochs):
        for xb, yb in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(xb), yb).backward()
            optimizer.step()

# %% accelerate
fit(optimizer, 1)

# %% accelerate
for param in net.backbone.parameters():
    param.requires_grad_(True)
optimizer = torch.optim.Adam([
    {"params": net.backbone.parameters(), "lr": 1e-3},
    {"params": net.fc.parameters()},
], lr=1e-2)
fit(optimizer, 2)
