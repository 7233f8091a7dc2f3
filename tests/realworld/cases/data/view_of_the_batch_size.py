# The loop reshapes by the batch size that it knows instead of the tensor's.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

BS = 8
images, labels = torch.randn(40, 1, 4, 4), torch.randint(0, 2, (40,))
loader = DataLoader(TensorDataset(images, labels), batch_size=BS, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for xb, yb in loader:
    loss = nn.functional.cross_entropy(model(xb.view(BS, 16)), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
