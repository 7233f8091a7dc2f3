# Weights of samples normalized within the batch before the weighted sum.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 3), torch.randn(40)
score = torch.randn(40)
loader = DataLoader(TensorDataset(x, y, score), batch_size=8)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb, sb in loader:
        advantage = (sb - sb.mean()) / (sb.std() + 1e-8)
        loss = (torch.sigmoid(advantage) * (model(xb).squeeze(1) - yb) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
