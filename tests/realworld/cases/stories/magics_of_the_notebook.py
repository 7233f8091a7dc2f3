# Magics that cells register, aliases, and magics of an extension run in the cell as in the notebook.
# outcome: equal
# compare: model, rate, doubled, twice, from_extension, listed, calls
# %%
import sys
from pathlib import Path

import torch
from torch import nn, optim
from IPython.core.magic import register_cell_magic, register_line_magic

torch.manual_seed(0)
inputs, targets = torch.randn(12, 4), torch.randn(12, 1)
model = nn.Linear(4, 1)
calls = []


@register_line_magic
def double(line):
    calls.append(line)
    return 2 * float(line)


@register_cell_magic
def repeat(line, cell):
    for _ in range(int(line)):
        exec(cell, globals())


Path("own_extension.py").write_text(
    "def load_ipython_extension(shell):\n    shell.register_magic_function(lambda line: len(line), 'line', 'length')\n"
)
sys.path.insert(0, ".")
%load_ext own_extension
%alias note echo %s >> notes.txt
rate = 0.05
# %% accelerate
lr = %double {rate}
opt = optim.SGD(model.parameters(), lr=lr)
%note one
doubled = %double 3
for step in range(2):
    loss = ((model(inputs) - targets) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
from_extension = %length abc
%note two
listed = open("notes.txt").read()
# %%
twice = 1
# %% accelerate
%%repeat 2
twice = twice + 1
