# An iterator that only the workers had comes back once it has ended: it takes the place of no object of the notebook.
# outcome: told the next cell on the workers continues reading it
# compare: holder, options, rest
# %%
options = {"limit": None, "names": [None, 1]}


class Holder:
    def __init__(self):
        self.value = None


holder = Holder()

# %% accelerate
numbered = enumerate(letter for letter in "abc")
first = next(numbered)

# %% accelerate
rest = list(numbered)

# %%
holder = holder.value
