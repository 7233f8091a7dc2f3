# A cell that reads shares evaluates on whole batches: the gathered rate is right, and a warning is about the count.
# outcome: told their sums and counts are
# compare: rate, model
# needs: torchmetrics
# %%
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(24, 5)
y = (x.sum(1) > 0).long()
model = nn.Linear(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=6)
mean, count = torchmetrics.MeanMetric(), torchmetrics.SumMetric()

# %% accelerate --divide data
for inputs, targets in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
with torch.no_grad():
    for inputs, targets in loader:
        mean.update((model(inputs).argmax(1) == targets).to(x.dtype))
        count.update(len(targets))
rate = mean.compute().item()
