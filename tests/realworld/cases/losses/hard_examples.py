# Online hard example mining: the mean of the largest losses of a batch.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(48, 4), torch.randint(0, 3, (48,))
loader = DataLoader(TensorDataset(x, y), batch_size=12)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        losses = F.cross_entropy(model(xb), yb, reduction="none")
        hardest, _ = losses.topk(k=4)
        loss = hardest.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
