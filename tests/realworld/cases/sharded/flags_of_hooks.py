# A model that a cell makes and shards: the notebook's hooks of it may have the numbers that hooks of sharding had.
# outcome: equal
# compare: model, twin, numbers, shapes
# %%
import copy
import torch
import torch.nn as nn

x, y = torch.randn(16, 3), torch.randn(16, 1)

# %% accelerate --strategy fsdp
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
twin = copy.deepcopy(model)

# %%
of_forward = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
numbers = [list(vars(part)[name]) for whole in (model, twin) for part in whole.modules() for name in of_forward]
shapes = []
model.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
model(x)
