# Hooks on layers, made by functools.partial.
# outcome: equal
# compare: means
# %%

from functools import partial

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 10)
Y = (X[:, 0] > 0).long()
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
activations, means = {}, []


def save_activation(name, module, inp, out):
    activations[name] = out.detach()
    means.append(out.mean().item())


for name, layer in model.named_children():
    layer.register_forward_hook(partial(save_activation, name))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
print(len(means), {k: tuple(v.shape) for k, v in activations.items()})
