# A script that looks for torchrun's variables and wraps its model itself: the module and the optimizer come back.
# outcome: told DistributedDataParallel
# compare: raw_model, optimizer.state_dict()['state'][0]['momentum_buffer'], losses

# %%
import os

import torch
from torch import nn
from torch.distributed import ReduceOp, all_reduce, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

rows = torch.randn(36, 4)

# %% accelerate
torch.manual_seed(0)
is_one_of_many = int(os.environ.get("RANK", -1)) != -1
if is_one_of_many:
    init_process_group(backend="gloo")
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
else:
    rank, num_ranks = 0, 1
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
if is_one_of_many:
    model = DistributedDataParallel(model)
raw_model = model.module if is_one_of_many else model
optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.1, momentum=0.9)
losses = []
for _ in range(4):
    loss = (model(rows[rank::num_ranks]) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach() / num_ranks
    if is_one_of_many:
        all_reduce(mean, op=ReduceOp.SUM)
    losses.append(mean.item())
if is_one_of_many:
    destroy_process_group()
