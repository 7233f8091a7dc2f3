# A magic that needs the notebook's own process is refused before the cell starts.
# outcome: refused %connect_info is a magic of the notebook's own process
# compare: count
# %%
import torch
from torch import nn

count = 1
# %% accelerate
count += 1
%connect_info
