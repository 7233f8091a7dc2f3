# Predictions of an epoch, read by worker processes.
# outcome: equal
# compare: preds, labels, model
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 6)
Y = torch.randint(0, 3, (128,))
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = optim.SGD(model.parameters(), lr=0.05)
criterion = nn.CrossEntropyLoss()
preds, labels = [], []

# %% accelerate
for epoch in range(2):
    preds, labels = [], []
    for x, y in loader:
        out = model(x)
        loss = criterion(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        preds.append(out.argmax(1))
        labels.append(y)
    preds, labels = torch.cat(preds), torch.cat(labels)
conf = torch.zeros(3, 3)
conf.index_put_((labels, preds), torch.ones(len(preds)), accumulate=True)
