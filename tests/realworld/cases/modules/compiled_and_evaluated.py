# A compiled model is trained and evaluated; the cell reads and keeps the weights of the model inside of it.
# outcome: equal
# compare: model, best, norms
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(32, 6), torch.randint(0, 2, (32,))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)

# %% accelerate
best, norms, lowest = {}, [], float("inf")
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(compiled(xb), yb).backward()
        optimizer.step()
    compiled.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(compiled(x), y).item()
    norms.append(sum(float(weight.norm()) for weight in model.parameters()))
    if loss < lowest:
        best, lowest = {name: value.clone() for name, value in model.state_dict().items()}, loss
    compiled.train()
