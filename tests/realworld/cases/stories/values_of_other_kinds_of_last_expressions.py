# A table that is a cell's last value is `_` in later cells. Of other objects the notebook has a note where they are.
# outcome: equal
# compare: table, column, kind, later, model
# needs: pandas
# %%
import pandas as pd
import torch
from torch import nn, optim

torch.manual_seed(0)
inputs, targets = torch.randn(12, 4), torch.randn(12, 1)
model = nn.Linear(4, 1)
opt = optim.SGD(model.parameters(), lr=0.05)
losses = []
0.5
# %% accelerate
for step in range(3):
    loss = ((model(inputs) - targets) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
pd.DataFrame({"step": range(3), "loss": [round(loss, 9) for loss in losses]})
# %%
table = _.copy()
# %% accelerate
column = _["loss"].tolist()
table["loss"].cumsum()
# %%
kind, later = type(_).__name__, _.round(6).tolist()
