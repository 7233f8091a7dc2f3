# Gradients read and changed between passes, kept over steps without zero_grad, and assigned by hand.
# outcome: equal
# needs: deepspeed
# compare: model, seen, optimizer
# %%
import torch
from torch import nn

torch.set_default_dtype(torch.float32)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(12, 3), torch.randn(12, 1)
seen = []

# %% accelerate --strategy deepspeed
def loss():
    return nn.functional.mse_loss(model(x), y)
for _ in range(3):
    loss().backward()
    seen.append([p.grad.clone() for p in model.parameters()])
    loss().backward()
    seen.append([p.grad.norm().item() for p in model.parameters()])
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    loss().backward()
    loss().backward()
    optimizer.step()
    seen.append([p.grad.norm().item() for p in model.parameters()])
loss().backward()
optimizer.step()
optimizer.step()
model[0].bias.grad.mul_(2)
optimizer.step()
optimizer.zero_grad()
seen.append([p.grad is None for p in model.parameters()])
for p in model.parameters():
    p.grad = torch.ones_like(p) if p.numel() else None
optimizer.step()
seen.append([p.grad.norm().item() for p in model.parameters()])
loss().backward()
optimizer.step()
seen.append([p.grad.norm().item() for p in model.parameters()])
