# A cell sets up logging to a file, as libraries' `get_logger` does, and the notebook and later cells write to it.
# outcome: equal
# compare: first, second, root, handlers
# %%
import logging
from pathlib import Path

import torch
from torch import nn

x = torch.randn(24, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for path in ("run.log", "root.log"):
    Path(path).unlink(missing_ok=True)


def get_logger():
    logger = logging.getLogger("run_of_a_cell")
    if not logger.handlers:
        handler = logging.FileHandler("run.log", mode="w")
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    return logger


def step():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


# %% accelerate
logging.basicConfig(filename="root.log", format="root: %(message)s", force=True)
get_logger().info("loss %.4f", step())
logging.warning("begun")

# %%
get_logger().info("of the notebook")
logging.warning("of the notebook")
first = Path("run.log").read_text()

# %% accelerate
get_logger().info("loss %.4f", step())
logging.warning("ended")

# %%
get_logger().info("last")
second, root = Path("run.log").read_text(), Path("root.log").read_text()
handlers = len(get_logger().handlers)
for logger in (get_logger(), logging.root):
    for handler in list(logger.handlers):
        if isinstance(handler, logging.FileHandler):
            logger.removeHandler(handler)
