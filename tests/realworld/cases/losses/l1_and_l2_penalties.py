# Mean cross entropy plus L1 and L2 penalties of the parameters.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(43, 5), torch.randint(0, 4, (43,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb), yb)
        l1 = sum(p.abs().sum() for p in model.parameters())
        l2 = sum(torch.square(p).sum() for name, p in model.named_parameters() if "weight" in name)
        loss = loss + 1e-3 * l1 + 1e-2 * l2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
