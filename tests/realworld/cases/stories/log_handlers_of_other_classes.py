# Handlers of the notebook that are no streams and no files get the records of a cell, each by its level and filters.
# outcome: equal
# compare: seen, errors, captured.getvalue(), lines, positions, heads

# %%
import io, logging
import torch
from torch import nn

seen, errors, lines, positions = [], [], [], []

class Listing(logging.Handler):
    def __init__(self, target, level=0):
        super().__init__(level)
        self.target = target

    def emit(self, record):
        self.target.append((record.name, record.levelname, self.format(record)))

class Positions(logging.Handler):
    def emit(self, record):
        positions.append((record.step, record.levelno, record.funcName))

captured = io.StringIO()
log = logging.getLogger("of a notebook")
log.handlers.clear()
log.setLevel(logging.INFO)
log.addHandler(Listing(seen))
log.addHandler(Listing(errors, logging.ERROR))
log.addHandler(logging.StreamHandler(captured))
root = Listing(lines)
root.setFormatter(logging.Formatter("{message}!", style="{"))
root.addFilter(lambda record: "loss" not in record.getMessage())
logging.getLogger().addHandler(root)
steps = log.getChild("steps")
steps.handlers.clear()
steps.addHandler(Positions())
steps.propagate = False

torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 3)
y = x.sum(1, keepdim=True)

# %% accelerate
def report(step):
    steps.info("", extra={"step": step})

for step in range(3):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.info("loss %.4f", loss)
    report(step)
try:
    [][0]
except IndexError:
    log.exception("no item %d", 0)
log.warning("end")
log.debug("below the logger's level")

# %%
heads = [head.splitlines()[-1] for _, _, head in seen]
seen = [(name, level, text.splitlines()[0]) for name, level, text in seen]
errors = [(name, level, text.splitlines()[-1]) for name, level, text in errors]
captured = io.StringIO(captured.getvalue().partition("Traceback")[0])
lines = [(name, level, text.splitlines()[0]) for name, level, text in lines]
logging.getLogger().removeHandler(root)
