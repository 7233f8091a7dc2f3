# A generator that the notebook has read from: where it is cannot be copied.
# outcome: refused it has yielded values already
# compare: model

# %%
import torch
from torch import nn

model = nn.Linear(3, 1)


def batches():
    while True:
        yield torch.randn(8, 3)


stream = batches()
example = next(stream)

# %% accelerate
loss = model(next(stream)).square().mean()
loss.backward()
