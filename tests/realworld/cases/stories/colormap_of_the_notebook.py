# A colormap that the notebook has registered, as the import of a library does, is the usual one of plots.
# outcome: equal
# compare: model, name, drawn, last
# %%
import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
from matplotlib.colors import ListedColormap

matplotlib.colormaps.register(ListedColormap(["red", "white", "blue"], name="three_tones"), force=True)
plt.rcParams["image.cmap"] = "three_tones"
X, Y = torch.randn(12, 2), torch.randn(12, 1)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for _ in range(2):
    loss = (model(X) - Y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
image = plt.imshow(X.numpy())
name = image.get_cmap().name
drawn = image.get_cmap()(range(3))
plt.close()
matplotlib.colormaps.register(ListedColormap(["black", "green"], name="two_tones"), force=True)
plt.rcParams["image.cmap"] = "two_tones"

# %%
image = plt.imshow(X.numpy())
last = image.get_cmap().name
plt.close()
plt.rcParams["image.cmap"] = "viridis"
for added in ("two_tones", "three_tones"):
    matplotlib.colormaps.unregister(added)
