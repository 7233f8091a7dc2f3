# Anchor, positive and negative from a dataset, one embedding network, triplet margin loss.
# outcome: equal
# compare: net
# runs: always
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Triplets(Dataset):
    def __init__(self, n=34):
        g = torch.Generator().manual_seed(2)
        self.a = torch.randn(n, 5, generator=g)
        self.p = self.a + 0.1 * torch.randn(n, 5, generator=g)
        self.n = torch.randn(n, 5, generator=g)

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return {"anchor": self.a[i], "positive": self.p[i], "negative": self.n[i]}


loader = DataLoader(Triplets(), batch_size=8, shuffle=True)
net = nn.Sequential(nn.Linear(5, 8), nn.PReLU(), nn.Linear(8, 4))
criterion = nn.TripletMarginLoss(margin=1.0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

# %% accelerate
for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss = criterion(net(batch["anchor"]), net(batch["positive"]), net(batch["negative"]))
        loss.backward()
        optimizer.step()
