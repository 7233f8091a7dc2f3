# Accumulation by hand whose last batches fill no window; the next cell on the workers goes on with the gradients.
# outcome: equal
# compare: model
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(20, 3), torch.randn(20, 1)), batch_size=4)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for index, (x, y) in enumerate(loader):
    (nn.functional.mse_loss(model(x), y) / 2).backward()
    if index % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()

# %% accelerate
optimizer.step()
