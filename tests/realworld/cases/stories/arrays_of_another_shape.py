# A cell gives an array and a tensor of the notebook another shape in place, which lists and dicts of it contain.
# outcome: equal
# compare: found, held, array, tensor
# runs: always

# %%
import numpy as np
import torch

array, tensor = np.zeros((3, 4)), torch.zeros(2)
held = {"array": array, "tensors": [tensor]}

# %% accelerate
array.shape = (-1,)
array += 1
tensor.data = torch.ones(3)

# %%
found = [held["array"] is array, held["tensors"][0] is tensor]
