# A siamese dataset that draws the partner of each sample with random.choice, contrastive margin loss.
# outcome: equal
# compare: net
# %%
import random
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class SiamesePairs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        same = random.randint(0, 1)
        choices = [j for j in range(len(self.x)) if (self.y[j] == self.y[i]).item() == bool(same)]
        j = random.choice(choices)
        return self.x[i], self.x[j], torch.tensor(float(self.y[i] != self.y[j]))


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=2.0):
        super().__init__()
        self.margin = margin

    def forward(self, a, b, label):
        distance = F.pairwise_distance(a, b, keepdim=True)
        return torch.mean(
            (1 - label) * torch.pow(distance, 2) + label * torch.pow(torch.clamp(self.margin - distance, min=0.0), 2)
        )


x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
loader = DataLoader(SiamesePairs(x, y), batch_size=8, shuffle=True)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
criterion = ContrastiveLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)

# %% accelerate
for epoch in range(2):
    for a, b, label in loader:
        optimizer.zero_grad()
        loss = criterion(net(a), net(b), label.unsqueeze(1))
        loss.backward()
        optimizer.step()
