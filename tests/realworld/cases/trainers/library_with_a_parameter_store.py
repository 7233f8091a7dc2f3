# A library creates the tensors that it trains, steps them itself, and keeps them in a store of its own module.
# outcome: told for tensors in no module
# compare: losses
# %%

import importlib
import sys
from pathlib import Path

import torch

Path("site-packages").mkdir()
Path("site-packages/tinyprob.py").write_text("""
import torch

STORE, OPTIMIZERS = {}, {}


def param(name, init):
    return STORE.setdefault(name, init.clone().requires_grad_())


def fit(loss_of, data, lr=0.1):
    loss = loss_of(data)
    loss.backward()
    for name, value in STORE.items():
        optimizer = OPTIMIZERS.setdefault(name, torch.optim.Adam([value], lr=lr))
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
""")
sys.path.insert(0, "site-packages")
sys.modules.pop("tinyprob", None)
importlib.invalidate_caches()
import tinyprob

data = torch.randn(20) + 3


def negative_log_likelihood(data):
    mean = tinyprob.param("mean", torch.zeros(()))
    return (data - mean).pow(2).mean()


# %% accelerate
losses = [tinyprob.fit(negative_log_likelihood, data) for _ in range(4)]

# %% accelerate
losses += [tinyprob.fit(negative_log_likelihood, data) for _ in range(2)]
