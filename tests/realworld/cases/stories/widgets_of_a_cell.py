# Bars and labels of the notebook's page that cells make, change and use again.
# outcome: equal
# compare: total, label.value, box.children[1].value, seen, last
# needs: ipywidgets, tqdm

# %%
import ipywidgets
import torch
from torch import nn
from tqdm.notebook import tqdm

torch.manual_seed(0)
inputs = torch.randn(12, 3)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
progress = ipywidgets.IntProgress(max=3)
box = ipywidgets.HBox([ipywidgets.Label("loss"), progress])
seen = []
progress.observe(lambda change: seen.append(change["new"]), "value")
last = None

# %% accelerate
label = ipywidgets.Label("begins")
total = 0.0
for epoch in tqdm(range(3)):
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()
    progress.value += 1
    label.value = f"epoch {epoch}"

# %%
progress.value = 0
label.value += ", ended"

# %% accelerate
for _ in range(2):
    progress.value += 1
last = (progress.value, label.value)
label.value = "again"
