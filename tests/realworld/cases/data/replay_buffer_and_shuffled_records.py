# Long lists that cells shuffle, slice and add to: their items are the notebook's, which other values hold too.
# outcome: equal
# compare: model, losses, same, numbers
# %%
import random
from collections import deque

import torch
import torch.nn as nn

records = [{"x": torch.randn(3), "seen": 0} for _ in range(200)]
first = records[0]
buffer = deque([(torch.randn(3), torch.randn(1)) for _ in range(150)], maxlen=200)
newest = buffer[-1]
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []

# %% accelerate
random.seed(3)
for epoch in range(2):
    random.shuffle(records)
    for start in range(0, 200, 40):
        x = torch.stack([record["x"] for record in records[start : start + 40]])
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    buffer.append((x[0], loss.detach().reshape(1)))
validation, held_out = records[:20], buffer[-2]
validation[3]["seen"] += 1

# %%
same = [any(record is first for record in records), validation[5] is records[5], held_out is buffer[-2]]
same += [any(pair[0] is newest[0] for pair in buffer), records[3] is validation[3]]
records.sort(key=lambda record: record["x"][0].item())
newest[1].zero_()
validation[0]["seen"] = 7

# %% accelerate
numbers = [sum(record["seen"] for record in records), sum(pair[1].item() for pair in buffer)]
same += [any(record is validation[0] for record in records), newest[1] is [p for p in buffer if p[1] is newest[1]][0][1]]
