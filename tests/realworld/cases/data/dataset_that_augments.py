# A dataset whose __getitem__ adds noise and flips at random.
# outcome: equal
# compare: model
# %%
import random
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Augmented(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        if random.random() < 0.5:
            image = image.flip(-1)
        return image + 0.05 * torch.randn_like(image), self.labels[i]


images, labels = torch.randn(32, 1, 5, 5), torch.randint(0, 2, (32,))
loader = DataLoader(Augmented(images, labels), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xb), yb).backward()
        optimizer.step()
