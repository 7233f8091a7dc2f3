# Metrics of torchmetrics that sum, count and concatenate, over training and evaluation; one is made in a function.
# outcome: equal
# compare: n, counts, entries, losses, scores
# needs: torchmetrics
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

x, y = torch.randn(34, 6), torch.randint(0, 3, (34,))
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
held_out = DataLoader(TensorDataset(x, y), batch_size=17)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
total, predictions = torchmetrics.SumMetric(), torchmetrics.CatMetric()
both = torchmetrics.MetricCollection({"acc": MulticlassAccuracy(3), "cm": MulticlassConfusionMatrix(3)})

# %% accelerate
losses, scores = [], []


def evaluate():
    metric = torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MeanMetric()])
    model.eval()
    with torch.no_grad():
        for xb, yb in held_out:
            metric.update((model(xb).argmax(1) == yb).double().sum())
    model.train()
    return {key: value.item() for key, value in metric.compute().items()}


for epoch in range(2):
    both.reset()
    mean = torchmetrics.MeanMetric(dist_sync_on_step=True)
    for xb, yb in loader:
        out = model(xb)
        loss = F.cross_entropy(out, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total.update(len(xb))
        predictions.update(out.detach()[:, 0])
        both.update(out.detach(), yb)
        losses.append(mean(loss.detach(), weight=len(xb)).item())
    losses.append(mean.compute().item())
    scores.append(evaluate())
n, counts, entries = total.compute().item(), both.compute()["cm"].tolist(), predictions.compute()
