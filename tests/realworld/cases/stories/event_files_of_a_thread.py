# A TensorBoard writer in a folder that the cell makes: a thread of the library writes the event file.
# outcome: equal
# compare: model, written
# needs: tensorboard
# %%
import glob
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(24, 3), torch.randn(24, 1)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)

# %% accelerate
from torch.utils.tensorboard import SummaryWriter

os.makedirs("logs/first", exist_ok=True)
writer = SummaryWriter("logs/first")
for step, (a, b) in enumerate(loader):
    loss = nn.functional.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    writer.add_scalar("loss", loss.item(), step)
writer.flush()
writer.close()

# %%
written = len(glob.glob("logs/first/*"))
