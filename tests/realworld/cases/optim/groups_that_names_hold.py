# A group of an optimizer has a name after a loop over the groups: what either side sets in it is set in the optimizer.
# outcome: equal
# compare: model, rates, same, opt.param_groups[1]['lr'], twin.param_groups[0]['lr']
# runs: always
# %%
import copy

import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(12, 4), torch.randn(12, 1)
model = nn.Linear(4, 1)
opt = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1, momentum=0.9)
rates = []


def step():
    opt.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    opt.step()
    rates.append([group["lr"] for group in opt.param_groups])


# %% accelerate
for group in opt.param_groups:
    group["lr"] *= 0.5
first, held = opt.param_groups[0], {"groups": opt.param_groups}
twin = copy.copy(opt)
step()

# %%
same = [group is opt.param_groups[1], first is opt.param_groups[0], held["groups"] is opt.param_groups]
same += [twin.state is opt.state, twin.param_groups is opt.param_groups, twin.defaults is opt.defaults]
group["lr"] = 0.01
held["groups"][0]["momentum"] = 0.5
step()

# %% accelerate
step()
first["lr"] = 0.02
held["groups"][1]["momentum"] = 0.1

# %%
step()
group["lr"] *= 2
