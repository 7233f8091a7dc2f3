# Magnitude pruning by torch.nn.utils.prune between training cells.
# outcome: equal
# compare: model, sparsity
# %%
import torch
import torch.nn as nn
import torch.nn.utils.prune as prune
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randint(0, 2, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 2))


def train(epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for xb, yb in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            optimizer.step()

# %% accelerate
train(1)

# %%
for module in model:
    if isinstance(module, nn.Linear):
        prune.l1_unstructured(module, name="weight", amount=0.3)

# %% accelerate
train(1)

# %%
for module in model:
    if isinstance(module, nn.Linear):
        prune.remove(module, "weight")
sparsity = sum(int((m.weight == 0).sum()) for m in model if isinstance(m, nn.Linear))
