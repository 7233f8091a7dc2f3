# A module of the notebook reads a file of the working folder when it is imported; the notebook then changes the folder.
# outcome: equal
# compare: losses, model, color
# %%
import os
import sys

import torch
import torch.nn as nn

with open("palette.txt", "w") as file:
    file.write("red blue")
with open("figure_style.py", "w") as file:
    file.write("PALETTE = open('palette.txt').read().split()\ncolor = PALETTE[0]\n\n\n")
    file.write("def set_color(value):\n    global color\n    color = value\n")
import figure_style

figure_style.set_color("blue")
os.makedirs("runs")
os.chdir("runs")
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []

# %% accelerate
for _ in range(2):
    loss = model(torch.ones(8, 3)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %%
color = figure_style.color
del sys.modules["figure_style"]
