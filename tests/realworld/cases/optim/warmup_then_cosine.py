# Warm-up and cosine chained by SequentialLR, a LambdaLR on a second optimizer, two networks.
# outcome: equal
# compare: body, head, rates
# %%
import torch
import torch.nn as nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randint(0, 3, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
body, head = nn.Sequential(nn.Linear(5, 8), nn.ReLU()), nn.Linear(8, 3)
opt_body = torch.optim.AdamW(body.parameters(), lr=0.01)
opt_head = torch.optim.SGD(head.parameters(), lr=0.1)
sched_body = SequentialLR(
    opt_body, [LinearLR(opt_body, 0.1, total_iters=3), CosineAnnealingWarmRestarts(opt_body, 4)], milestones=[3]
)
sched_head = LambdaLR(opt_head, lr_lambda=lambda step: 0.9 ** step)

# %% accelerate
rates = []
for epoch in range(2):
    for i, (xb, yb) in enumerate(loader):
        loss = nn.functional.cross_entropy(head(body(xb)), yb)
        opt_body.zero_grad(); opt_head.zero_grad()
        loss.backward()
        opt_body.step(); opt_head.step()
        sched_body.step(); sched_head.step()
        rates.append((opt_body.param_groups[0]["lr"], opt_head.param_groups[0]["lr"]))
