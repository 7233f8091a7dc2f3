# Attributes that code sets on parameters: in the notebook, in a cell on the workers, and changed in both.
# outcome: equal
# compare: weights, importance, scales
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
model.weight.lr_scale = 0.1
model.bias._no_weight_decay = True

# %% accelerate
for p in model.parameters():
    p.importance = torch.zeros_like(p)
for step in range(3):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.grad.mul_(getattr(p, "lr_scale", 1.0))
        p.importance += p.grad**2
        if not getattr(p, "_no_weight_decay", False):
            p.data.mul_(0.9)
    optimizer.step()
model.bias.lr_scale = 0.5

# %%
total = sum(p.importance.sum().item() for p in model.parameters())
model.weight.lr_scale = 1 / (1 + total)

# %% accelerate
optimizer.zero_grad()
F.cross_entropy(model(x), y).backward()
for p in model.parameters():
    p.grad.mul_(p.lr_scale)
optimizer.step()
scales = [p.lr_scale for p in model.parameters()]

# %%
weights = model.weight.detach().clone()
importance = [p.importance.clone() for p in model.parameters()]
