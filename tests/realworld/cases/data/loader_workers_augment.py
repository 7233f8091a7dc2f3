# Random augmentation, drawn by worker processes of the loader.
# outcome: equal
# compare: model, optimizer
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset


class Aug(Dataset):
    """adds noise to a sample, as an augmentation does"""

    def __init__(self):
        self.x = torch.randn(128, 4)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self):
        return 128

    def __getitem__(self, i):
        return self.x[i] + 0.3 * torch.randn(4), self.y[i]


loader = DataLoader(Aug(), batch_size=32, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()

# %% accelerate
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
print("done")
