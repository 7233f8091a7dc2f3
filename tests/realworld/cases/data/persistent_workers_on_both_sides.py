# Loaders with persistent worker processes that one side has read first, and both sides read later.
# outcome: equal
# compare: model, seen, later
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
options = {"batch_size": 8, "shuffle": True, "num_workers": 1, "persistent_workers": True}
loader, other = (DataLoader(TensorDataset(x, y), **options) for _ in range(2))
seen = [next(iter(loader))[0].sum().item()]
# %% accelerate
for part in (loader, other):
    for inputs, targets in part:
        loss = ((model(inputs) - targets) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen.append(loss.item())
# %%
later = [batch[0].sum().item() for part in (loader, other) for batch in part]
# %% accelerate
later += [batch[0].sum().item() for part in (loader, other) for batch in part]
