# An optimizer steps a model and a tensor that no model has, which DeepSpeed would leave as it is.
# outcome: refused is in none of the prepared models
# compare: model, scale
# needs: deepspeed
# %%
import torch
from torch import nn

model = nn.Linear(4, 1).float()
scale = torch.ones(1, dtype=torch.float32, requires_grad=True)
optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
x, y = torch.randn(16, 4, dtype=torch.float32), torch.randn(16, 1, dtype=torch.float32)

# %% accelerate --strategy deepspeed
for _ in range(3):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x) * scale, y).backward()
    optimizer.step()
