# A cell on workers binds names, a plain cell binds them anew, and the first cell is run again.
# outcome: equal
# compare: epochs, label, rate, table
# runs: always
# %% accelerate
epochs = 1
label = "warm-up"
rate = 0.5
table = None

# %%
epochs, label, rate, table = 5, "main", 0.1, {"a": 1}

# %% accelerate
epochs = 1
label = "warm-up"
rate = 0.5
table = None
