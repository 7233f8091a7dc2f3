# A frozen encoder computes the features of each sample inside of the dataset, in the loader's processes.
# outcome: equal
# compare: model, losses
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Features(Dataset):
    def __init__(self, encoder):
        self.encoder = encoder
        self.x = torch.randn(48, 6)
        self.y = torch.randint(0, 3, (48,))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        with torch.no_grad():
            return self.encoder(self.x[index : index + 1]).squeeze(0), self.y[index]


encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU()).eval()
loader = DataLoader(Features(encoder), batch_size=16, shuffle=True, num_workers=2)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
