# A process that runs beside the cell: each worker starts its own, and a warning says so; its result is read here.
# outcome: told workers starts this process
# compare: text, status, listed, model
# %%
import os
import subprocess

import torch
from torch import nn

x = torch.randn(16, 3)
model = nn.Linear(3, 1)

# %% accelerate
with subprocess.Popen(["echo", "begun"], stdout=subprocess.PIPE, text=True) as process:
    text = process.communicate()[0]
status = process.wait()
del process
with os.popen("echo listed") as pipe:
    listed = pipe.read()
del pipe
model(x).sum().backward()
with torch.no_grad():
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad
