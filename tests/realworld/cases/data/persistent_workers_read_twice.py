# A loader with persistent worker processes, read by loops, by next(iter(loader)), and by an iterator beside a loop.
# outcome: equal
# compare: model, seen
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
seen = []
# %% accelerate
fixed = next(iter(loader))
for epoch in range(2):
    for inputs, targets in loader:
        loss = ((model(inputs) - targets) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen.append(loss.item())
    seen.append(next(iter(loader))[0].sum().item())
beside = iter(loader)
for inputs, targets in loader:  # both read the same iterator
    loss = ((model(inputs) - targets) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    seen += [loss.item(), next(beside, [torch.zeros(1)])[0].sum().item()]
