# Cross entropy plus a center loss with centers of its own, gradients of the centers rescaled before their step.
# outcome: equal
# compare: model, centers
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.classify = nn.Linear(4, 2), nn.Linear(2, 3)

    def forward(self, x):
        f = torch.tanh(self.features(x))
        return f, self.classify(f)


class CenterLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(3, 2))

    def forward(self, f, labels):
        return (f - self.centers[labels]).pow(2).sum(1).mean()


x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model, centers = Model(), CenterLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
center_optimizer = torch.optim.SGD(centers.parameters(), lr=0.5)
weight = 0.1

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        f, logits = model(xb)
        loss = F.cross_entropy(logits, yb) + weight * centers(f, yb)
        optimizer.zero_grad()
        center_optimizer.zero_grad()
        loss.backward()
        for p in centers.parameters():
            p.grad.data *= 1.0 / weight
        optimizer.step()
        center_optimizer.step()
