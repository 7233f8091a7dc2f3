# A function advances a bar of the notebook, and the cell runs again: the file of the bar holds the shell of IPython 9.
# outcome: equal
# compare: model, count, still
# %%
import torch
from torch import nn
from tqdm import tqdm

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.randn(4, 6, 3)


def train_epoch():
    for batch in batches:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.update(1)


# %% accelerate
with tqdm(total=4) as bar:
    train_epoch()
# %% accelerate
with tqdm(total=4) as bar:
    train_epoch()
# %%
count = bar.n
# %% accelerate
still = bar.n
