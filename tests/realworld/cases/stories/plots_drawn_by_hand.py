# Plots look as drawn by hand, a style that has objects, from the notebook on; a cell plots and chooses it again.
# outcome: equal
# compare: model, losses, sizes
# needs: matplotlib
# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

inputs = torch.randn(24, 5)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, sizes = [], []
plt.xkcd();

# %% accelerate
for x, y in zip(inputs.split(8), targets.split(8)):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
sizes.append(plt.rcParams["font.size"])
plt.plot(losses)
plt.show()
plt.rcdefaults()
plt.xkcd();

# %%
sizes.append(plt.rcParams["font.size"])
plt.rcdefaults()
