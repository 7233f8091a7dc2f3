# A pass leaves a layer out: Adam leaves out its weights on one device, and DeepSpeed steps them with zeros.
# outcome: told 2 of 4 parameters have no gradient
# compare: model
# needs: deepspeed
# %%
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).float()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
x, y = torch.randn(16, 4, dtype=torch.float32), torch.randn(16, 1, dtype=torch.float32)

# %% accelerate --strategy deepspeed
for number in range(3):
    optimizer.zero_grad()
    hidden = x if number % 2 else model[0](x)
    nn.functional.mse_loss(model[1](hidden), y).backward()
    optimizer.step()
