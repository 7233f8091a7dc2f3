# The first batches set the learning rate themselves, then a scheduler steps once in each epoch.
# outcome: equal
# compare: model, rates, scheduler.state_dict()
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), batch_size=8, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
rates = []


def warm_up(step, base=0.1, length=5):
    if step < length:
        for group in optimizer.param_groups:
            group["lr"] = base * (step + 1) / length


# %% accelerate
step = 0
for epoch in range(2):
    for x, y in loader:
        warm_up(step)
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        step += 1
    scheduler.step()
