# Loggers with files, set up in the notebook, are written to by plain cells and by cells on workers in turn.
# outcome: equal
# compare: model, lines, others
# %%
import logging
import sys
import torch
import torch.nn as nn

log = logging.getLogger("experiment")
log.setLevel(logging.INFO)
log.propagate = False
log.handlers.clear()
for handler in (logging.FileHandler("train.log", mode="w"), logging.StreamHandler(sys.stdout)):
    handler.setFormatter(logging.Formatter("{levelname}: {message}", style="{"))
    log.addHandler(handler)
extra = logging.FileHandler("errors.log")
extra.setLevel(logging.ERROR)
log.addHandler(extra)
x, y = torch.randn(16, 3), torch.randn(16, 1)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def fit(steps):
    for step in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.info("step %d: %.6f", step, loss.item())


log.info("begin")

# %% accelerate
fit(2)
log.error("an error")

# %%
log.info("between")

# %% accelerate
fit(1)

# %%
log.info("end")
with open("train.log") as file:
    lines = file.read().splitlines()
with open("errors.log") as file:
    others = file.read().splitlines()
for handler in list(log.handlers):
    handler.close()
    log.removeHandler(handler)
