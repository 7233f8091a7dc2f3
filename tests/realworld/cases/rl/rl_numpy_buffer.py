# Rl numpy buffer.
# outcome: equal
# compare: x, y, loss, model
# %%

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim


class Buffer:
    """preallocated arrays, with torch views of them"""

    def __init__(self, n):
        self.s = np.zeros((n, 4))
        self.r = np.zeros(n)
        self.n = 0
        self.ts, self.tr = torch.from_numpy(self.s), torch.from_numpy(self.r)

    def add(self, s, r):
        self.s[self.n % len(self.s)] = s
        self.r[self.n % len(self.s)] = r
        self.n += 1

    def sample(self, k):
        i = torch.from_numpy(np.random.randint(0, min(self.n, len(self.s)), k))
        return self.ts[i], self.tr[i]


buffer = Buffer(64)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.SGD(model.parameters(), lr=1e-2)

# %% accelerate
for step in range(40):
    s = np.random.randn(4)
    buffer.add(s, s.sum())
    if step >= 8:
        x, y = buffer.sample(16)
        loss = F.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(loss.item(), buffer.tr.sum().item())

# %%
print(buffer.r.sum(), buffer.tr.sum().item(), buffer.n)
