# A row of a parameter that an earlier cell has taken cannot follow the parameter under FSDP.
# outcome: told is in the memory of a shard of a parameter
# compare: model, history
# %%
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
row = model[0].weight.data[1]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
history = []

# %% accelerate --strategy fsdp
for _ in range(3):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    row.mul_(0.5)
    history.append(row.norm().item())
