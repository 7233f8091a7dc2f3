# The same where one sample of a batch is selected: the other shares have none, and the mean of nothing is NaN.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(24, 4), torch.randn(24, 1)
valid = torch.arange(24) % 8 == 0
loader = DataLoader(TensorDataset(x, y, valid), batch_size=8)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb, ok in loader:
        prediction = model(xb)
        loss = nn.functional.mse_loss(prediction[ok], yb[ok])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
