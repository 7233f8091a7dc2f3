# A stream that reads lines and yields samples.
# outcome: equal
# compare: model, count
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

with open("rows.csv", "w") as f:
    for row in torch.randn(37, 4).tolist():
        f.write(",".join(map(str, row)) + "\n")


class Rows(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with open(self.path) as f:
            for line in f:
                *x, y = (float(v) for v in line.split(","))
                yield torch.tensor(x), torch.tensor([y])


loader = DataLoader(Rows("rows.csv"), batch_size=8)
model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
count = 0
for epoch in range(2):
    for i, (xb, yb) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(xb), yb).backward()
        optimizer.step()
        count += 1
