# A library sets the level of its logger as it is imported, and the notebook sets another one after that.
# outcome: equal
# compare: levels, losses
# %%
import logging
from pathlib import Path

import torch

for name in ("talkative", "brief"):
    Path(name).mkdir()
    Path(name, "__init__.py").write_text(
        f"import logging\nlogger = logging.getLogger({name!r})\nlogger.setLevel(logging.INFO)\n"
    )
    Path(name, "losses.py").write_text(
        f"from {name} import logger\ndef square(x):\n    logger.info('computing')\n    return (x ** 2).mean()\n"
    )
import brief
import talkative
import talkative.losses
from brief.losses import square

names = "talkative", "brief"
for name in names:
    logging.getLogger(name).setLevel(logging.ERROR)
model, levels, losses = torch.nn.Linear(3, 1), [], []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
levels += [logging.getLogger(name).level for name in names]

# %% accelerate
for _ in range(2):
    loss = talkative.losses.square(model(torch.ones(8, 3))) + square(model(torch.zeros(8, 3)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
levels += [logging.getLogger(name).level for name in names]

# %%
levels += [logging.getLogger(name).level for name in names]
