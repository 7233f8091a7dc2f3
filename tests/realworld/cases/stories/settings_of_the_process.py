# Settings of the interpreter, libraries and torch that the notebook or a cell makes hold on the other side.
# outcome: equal
# compare: model, in_cell, after
# %%
import decimal
import gc
import logging
import os
import socket
import sys
import time
import warnings

import matplotlib
import torch
from torch import nn, optim

torch.manual_seed(0)
inputs, targets = torch.randn(12, 4), torch.randn(12, 1)
model = nn.Linear(4, 1)


def mask_of(path):
    with open(path, "w"):
        pass
    mode = os.stat(path).st_mode & 0o777
    os.remove(path)
    return mode


def read():
    return {
        "decimals": decimal.getcontext().prec,
        "garbage": (gc.isenabled(), gc.get_threshold()),
        "disabled": logging.root.manager.disable,
        "timeout": socket.getdefaulttimeout(),
        "limits": (getattr(sys, "tracebacklimit", None), round(sys.getswitchinterval(), 4)),
        "zone": time.tzname[0],
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "plots": matplotlib.is_interactive(),
        "validates": torch.distributions.Distribution._validate_args,
        "log of warnings": len(logging.getLogger("py.warnings").handlers) and warnings.showwarning is logging._showwarning,
        "mask": mask_of("made.txt"),
    }


decimal.getcontext().prec = 6
gc.set_threshold(500, 5, 5)
sys.tracebacklimit = 3
socket.setdefaulttimeout(20)
os.environ["TZ"] = "Asia/Tokyo"
time.tzset()
torch.backends.cudnn.benchmark = True
matplotlib.interactive(True)
torch.distributions.Distribution.set_default_validate_args(False)
logging.captureWarnings(True)
os.umask(0o027)
# %% accelerate
in_cell = read()
opt = optim.SGD(model.parameters(), lr=0.05)
for _ in range(2):
    loss = ((model(inputs) - targets) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
decimal.getcontext().prec = 9
gc.disable()
logging.disable(logging.INFO)
sys.setswitchinterval(0.02)
del sys.tracebacklimit
matplotlib.interactive(False)
torch.distributions.Distribution.set_default_validate_args(True)
logging.captureWarnings(False)
os.umask(0o077)
# %%
after = read()
os.umask(0o022)
gc.enable()
sys.setswitchinterval(0.005)
logging.disable(logging.NOTSET)
socket.setdefaulttimeout(None)
