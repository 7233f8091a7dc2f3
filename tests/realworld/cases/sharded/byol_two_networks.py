# A target network that is an average of the online network; both are sharded.
# outcome: equal
# compare: online, target, predictor
# %%
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

v1 = torch.randn(40, 6)
v2 = v1 + 0.1 * torch.randn(40, 6)
loader = DataLoader(TensorDataset(v1, v2), batch_size=8, shuffle=True)
online = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
predictor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
target = copy.deepcopy(online)
for p in target.parameters():
    p.requires_grad = False
optimizer = torch.optim.SGD(list(online.parameters()) + list(predictor.parameters()), lr=0.1)


def regression_loss(x, y):
    return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(dim=-1)

# %% accelerate --strategy fsdp
for epoch in range(2):
    for a, b in loader:
        with torch.no_grad():
            ta, tb = target(a), target(b)
        loss = (regression_loss(predictor(online(a)), tb) + regression_loss(predictor(online(b)), ta)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for o, t in zip(online.parameters(), target.parameters()):
                t.data = t.data * 0.9 + o.data * 0.1
