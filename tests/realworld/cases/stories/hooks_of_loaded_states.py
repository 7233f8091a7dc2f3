# Hooks of `load_state_dict`, of the notebook and of weight norm, stay when a cell on workers changes a model's dtype.
# outcome: equal
# compare: calls, numbers, weight

# %%
import torch
from torch import nn

calls = []
model, normed = nn.Linear(3, 2), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
old = nn.utils.weight_norm(nn.Linear(3, 2)).state_dict()


def note_prefix(module, state, prefix, *others):
    calls.append(prefix)


model.register_load_state_dict_pre_hook(note_prefix)

# %% accelerate
model.float()
normed.float()

# %%
model.load_state_dict(model.state_dict())
normed.load_state_dict(old)
numbers = [len(held._load_state_dict_pre_hooks) for held in (model, normed)]

# %% accelerate
normed.load_state_dict(old)
model.load_state_dict(model.state_dict())

# %%
model.load_state_dict(model.state_dict())
weight = normed.weight.detach().clone()
