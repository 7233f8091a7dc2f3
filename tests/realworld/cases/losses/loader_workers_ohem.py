# Hard examples after a first epoch, read by worker processes.
# outcome: equal
# compare: model
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 6)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = optim.SGD(model.parameters(), lr=0.05)

# %% accelerate
for epoch in range(3):
    for x, y in loader:
        each = ((model(x) - y) ** 2).squeeze(1)
        if epoch > 0:
            each = each.topk(8)[0]  # hard examples after a warmup epoch
        loss = each.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("done")
