# A figure of an earlier cell that accelerated cells draw the losses into.
# outcome: equal
# compare: lines, len(axes.lines), is_same, model
# needs: matplotlib

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(12, 3)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
figure, axes = plt.subplots()
plt.close(figure)

# %% accelerate
for run in range(2):
    losses = []
    for step in range(4):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    axes.plot(losses, label=f"run {run}")
axes.set_title("loss")

# %%
is_same = figure.axes[0] is axes
lines = [list(line.get_ydata()) for line in axes.lines]
