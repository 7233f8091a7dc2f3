# A library sets the level of its logger as it is imported, and the notebook sets another one after that.
# outcome: equal
# compare: levels, losses
# %%
import logging
from pathlib import Path

import torch

Path("talkative.py").write_text(
    "import logging\n"
    "logger = logging.getLogger('talkative')\n"
    "logger.setLevel(logging.INFO)\n"
    "def loss(x):\n"
    "    logger.info('computing')\n"
    "    return (x ** 2).mean()\n"
)
import talkative

logging.getLogger("talkative").setLevel(logging.ERROR)
model, levels, losses = torch.nn.Linear(3, 1), [], []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
levels.append(logging.getLogger("talkative").level)

# %% accelerate
for _ in range(2):
    loss = talkative.loss(model(torch.ones(8, 3)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
levels.append(logging.getLogger("talkative").level)

# %%
levels.append(logging.getLogger("talkative").level)
