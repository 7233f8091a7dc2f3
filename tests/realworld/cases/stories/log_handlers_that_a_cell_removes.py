# A cell removes a handler of its notebook from a logger, and gives another logger one handler in place of another.
# outcome: equal
# compare: seen, others, kinds
# runs: always

# %%
import logging

seen, others = [], []

class Listing(logging.Handler):
    def __init__(self, target):
        super().__init__()
        self.target = target

    def emit(self, record):
        self.target.append(record.getMessage())

log, other = logging.getLogger("with a handler"), logging.getLogger("with two handlers")
log.handlers.clear()
log.addHandler(Listing(seen))
other.addHandler(Listing(others))
other.addHandler(logging.FileHandler("others.log"))
log.warning("one")
other.warning("one")

# %% accelerate
log.warning("two")
while log.handlers:
    log.removeHandler(log.handlers[0])
other.handlers.clear()
other.addHandler(logging.FileHandler("later.log"))
log.warning("three")
other.warning("three")

# %%
log.warning("four")
other.warning("four")
kinds = [[type(handler).__name__ for handler in logger.handlers] for logger in (log, other)]
others += [open("others.log").read(), open("later.log").read()]
other.handlers.clear()
