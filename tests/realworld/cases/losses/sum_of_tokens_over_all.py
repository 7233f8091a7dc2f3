# Sums over tokens, divided by a constant of the whole set; and sums over samples, not divided.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(43, 6, 3), torch.randint(0, 5, (43, 6))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Linear(3, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
num_tokens = y.numel()

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb).transpose(1, 2), yb, reduction="sum") / num_tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
