# The loop ends as soon as the printed loss of a batch is below a threshold.
# outcome: equal
# compare: model, epoch
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
x = torch.randn(48, 3)
y = x.sum(1, keepdim=True) + torch.linspace(0, 3, 48).unsqueeze(1) * torch.randn(48, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% accelerate
done = False
for epoch in range(20):
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.25:
            done = True
            break
    if done:
        break
