# The class of an object is one that a function of the notebook defines: no name refers to it.
# outcome: equal
# compare: a, shown
# %%
def make():
    class Counter:
        total = 0
        seen = []

        def add(self, value):
            type(self).total += value
            type(self).seen.append(value)

    return Counter()


counter = make()
other = type(counter)()

# %% accelerate
counter.add(3)
shown = repr(type(counter))

# %%
a = type(counter).total, type(counter).seen, type(other).total
