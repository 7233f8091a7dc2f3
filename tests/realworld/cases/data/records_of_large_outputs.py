# A small model with large outputs; the loop keeps records of each sample.
# outcome: equal
# compare: model, records, seen, average, hits
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 12000
words = torch.randint(0, VOCABULARY, (72,))
numbers = torch.arange(72)
loader = DataLoader(TensorDataset(torch.randn(72, 4), words, numbers), batch_size=24, shuffle=True)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.randn(4, VOCABULARY))

    def forward(self, x):
        return (x * self.scale) @ self.table


model = Scaled()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
records = torch.zeros(72)
seen = 0
average = []
hits = []
for epoch in range(2):
    total = 0.0
    for x, y, number in loader:
        logits = model(x)
        each = F.cross_entropy(logits, y, reduction="none")
        weight = torch.where(records[number] > each.median(), 2.0, 1.0) if epoch else torch.ones(len(each))
        loss = (each * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        records[number] = each.detach()
        seen += len(x)
        total += loss.item() * len(x) / len(loader.dataset)
        hits += (logits.argmax(1) == y).tolist()
    average.append(total)
