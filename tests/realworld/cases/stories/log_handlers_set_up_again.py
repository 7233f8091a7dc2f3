# Cells on workers clear the handlers of a logger and add an equal one, one with a format, and a further one.
# outcome: equal
# compare: formats, filters

# %%
import logging
import warnings

log, formats = logging.getLogger("set up again"), []


def look():
    formats.append([getattr(handler.formatter, "_fmt", None) for handler in log.handlers])


log.addHandler(logging.StreamHandler())
warnings.filterwarnings("error", "a bad sign")
look()

# %% accelerate
log.handlers.clear()
log.addHandler(logging.StreamHandler())
warnings.filterwarnings("error", "a bad sign")

# %%
look()

# %% accelerate
log.handlers.clear()
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
log.addHandler(handler)

# %%
look()

# %% accelerate
log.addHandler(logging.StreamHandler())

# %%
look()
log.handlers.clear()
filters = sum(item[0] == "error" and getattr(item[1], "pattern", "") == "a bad sign" for item in warnings.filters)
warnings.filters[:] = [item for item in warnings.filters if getattr(item[1], "pattern", "") != "a bad sign"]
