# Grad norm log eval.
# outcome: equal
# compare: norms
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.SGD(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
model.eval()  # frozen batch norm and dropout while fine-tuning
norms = []

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        norms.append(sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5)
        for p in model.parameters():
            p.grad.data.clamp_(-0.1, 0.1)
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
print(round(norms[0], 4))
