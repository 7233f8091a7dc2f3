# Label smoothing in cross entropy together with ignored targets.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(40, 5, 4)
y = torch.randint(0, 6, (40, 5))
y[torch.rand(40, 5) < 0.4] = -100
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Linear(4, 6)
criterion = nn.CrossEntropyLoss(ignore_index=-100, label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = criterion(model(xb).view(-1, 6), yb.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
