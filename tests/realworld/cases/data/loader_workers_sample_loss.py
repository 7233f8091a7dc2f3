# Weights of samples by their earlier losses, read by worker processes.
# outcome: equal
# compare: model, history
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset

X = torch.randn(128, 6)
Y = X.sum(1, keepdim=True)


class D(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        return X[i], Y[i], i


loader = DataLoader(D(), batch_size=32, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = optim.SGD(model.parameters(), lr=0.05)
history = torch.zeros(128)

# %% accelerate
for epoch in range(3):
    for x, y, i in loader:
        each = ((model(x) - y) ** 2).squeeze(1)
        w = 1 / (1 + history[i])  # trust samples with a small loss so far
        loss = (w * each).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history[i] = 0.5 * history[i] + 0.5 * each.detach()
print("done")
