# The value of a cell's last expression is `_` and in Out in later cells, of the notebook and on the workers.
# outcome: equal
# compare: model, rate, loss_before, read, third, texts, numbers, is_model
# %%
import torch
from torch import nn, optim

torch.manual_seed(0)
inputs, targets = torch.randn(12, 4), torch.randn(12, 1)
model = nn.Linear(4, 1)
opt = optim.SGD(model.parameters(), lr=0.05)
0.5
# %% accelerate
rate = _ / 10
for _ in range(2):
    loss = ((model(inputs) - targets) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
del _
round(loss.item(), 9)
# %%
loss_before = _
# %% accelerate
[round(loss.item(), 9), 7]
# %% accelerate
read, third = _[1], __
numbers = sorted(map(str, [item for item in Out.values() if not isinstance(item, nn.Module)]))
texts = len(In) > 3 and "[round(loss.item(), 9), 7]" in _i
model
# %%
is_model = _ is model
