# A filter of the notebook, and then one of a cell, makes warnings of the notebook's code exceptions on both sides.
# outcome: equal
# compare: model, raised
# %%
import warnings

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randn(8, 2)
raised = []
filters = warnings.filters[:]


def step(kind):
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    try:
        warnings.warn("of the notebook", kind)
        raised.append(False)
    except kind:
        raised.append(True)


warnings.simplefilter("error", UserWarning)
# %% accelerate
step(UserWarning)
step(FutureWarning)
warnings.simplefilter("error", FutureWarning)
# %%
step(FutureWarning)
# %% accelerate
step(FutureWarning)
# %%
warnings.filters[:] = filters
# %% accelerate
step(FutureWarning)
# %%
step(UserWarning)
