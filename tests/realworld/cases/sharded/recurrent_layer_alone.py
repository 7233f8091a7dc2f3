# A recurrent layer that is not part of another module, and a head.
# outcome: equal
# compare: model.weight_ih_l0, lin.weight, losses
# %%
import torch
from torch import nn
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.LSTM(1, 5, 2, batch_first=True); lin = nn.Linear(5, 1)
opt = torch.optim.Adam([*model.parameters(), *lin.parameters()], lr=0.01)
x, y = torch.randn(32, 6, 1), torch.randn(32, 1)
losses = []
# %% accelerate --strategy fsdp
for _ in range(4):
    opt.zero_grad()
    out, _ = model(x)
    loss = (lin(out[:, -1]) - y).pow(2).mean()
    loss.backward()
    opt.step()
    losses.append(loss.item())
