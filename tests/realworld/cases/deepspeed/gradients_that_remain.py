# A loop that never calls zero_grad adds each gradient to those of the steps before.
# outcome: equal
# compare: model
# needs: deepspeed
# %%
import torch
from torch import nn

model = nn.Linear(4, 1).float()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(16, 4, dtype=torch.float32), torch.randn(16, 1, dtype=torch.float32)

# %% accelerate --strategy deepspeed
for _ in range(3):
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
