# A handler of a class of the notebook, which a cell on the workers makes and adds.
# outcome: told Listing, which the cell has added to the logger 'of a cell'
# compare: number

# %%
import logging

class Listing(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

log = logging.getLogger("of a cell")
log.handlers.clear()

# %% accelerate
listing = Listing()
log.addHandler(listing)
log.warning("one")
number = len(listing.texts)
