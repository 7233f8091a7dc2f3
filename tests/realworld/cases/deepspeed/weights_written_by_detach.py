# Weights are clamped through detach() after steps: before a pass, before a state dict, and last in a cell.
# outcome: equal
# needs: deepspeed
# compare: model, kept
# %%
import torch
from torch import nn

torch.set_default_dtype(torch.float32)
x, y = torch.randn(12, 3), torch.randn(12, 1)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

# %% accelerate --strategy deepspeed --zero-stage 3
for bound in (0.4, 0.3, 0.2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    for p in model.parameters():
        p.detach().clamp_(-bound, bound)
    if bound == 0.3:
        kept = {name: value.clone() for name, value in model.state_dict().items()}
