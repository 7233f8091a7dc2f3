# A progress bar of an earlier cell that is a widget of the notebook's page.
# outcome: equal
# compare: total
# needs: ipywidgets, tqdm

# %%
from tqdm.notebook import tqdm

bar = tqdm(total=4)
total = 0

# %% accelerate
for number in range(4):
    total += number
    bar.update(1)
