# An encoder is called in the notebook, and the backward pass runs on the workers: the graph is not sent.
# outcome: refused computed in another process
# compare: encoder, head
# runs: always
# %%
import torch
from torch import nn

encoder, head = nn.Linear(3, 3), nn.Linear(3, 1)
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
x, y = torch.randn(12, 3), torch.randn(12, 1)
features = encoder(x)

# %% accelerate
loss = nn.functional.mse_loss(head(features), y)
print(loss.item())
loss.backward()
optimizer.step()
