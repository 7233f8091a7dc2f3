# Hooks of the steps of one optimizer and of all, a schedule, and steps with a closure.
# outcome: equal
# needs: deepspeed
# compare: model, seen, optimizer, calls
# %%
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

torch.set_default_dtype(torch.float32)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
x, y = torch.randn(12, 3), torch.randn(12, 1)
seen, calls = [], []

# %% accelerate --strategy deepspeed
def loss():
    return nn.functional.mse_loss(model(x), y)
optimizer.register_step_pre_hook(lambda o, a, k: seen.append([p.grad.norm().item() for g in o.param_groups for p in g["params"]]))
optimizer.register_step_post_hook(lambda o, a, k: seen.append([p.grad.norm().item() for g in o.param_groups for p in g["params"]]))
optimizer.register_step_post_hook(lambda o, a, k: [p.detach().clamp_(-0.5, 0.5) for g in o.param_groups for p in g["params"]])
handle = register_optimizer_step_post_hook(lambda o, a, k: calls.append(type(o).__name__ + str(len(o.param_groups[0]["params"]))))
for _ in range(3):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    scheduler.step()
def closure():
    optimizer.zero_grad()
    value = loss()
    value.backward()
    return value
for _ in range(3):
    seen.append(optimizer.step(closure).item())
handle.remove()
