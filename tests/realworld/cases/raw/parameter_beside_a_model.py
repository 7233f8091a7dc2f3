# A learnable temperature as a raw tensor beside a model, in one optimizer, batches from a loader.
# outcome: equal
# compare: model, temperature
# runs: always
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Linear(4, 3)
temperature = torch.ones(1, requires_grad=True)
optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb) / temperature, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
