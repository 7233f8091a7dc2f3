# Moe capacity.
# outcome: equal
# compare: model, losses
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 8)
Y = torch.randint(0, 3, (128,))
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.CrossEntropyLoss()


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(8, 4)
        self.ex = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.o = nn.Linear(8, 3)

    def forward(self, x):
        p = self.g(x).softmax(1)
        v, r = p.max(1)
        cap = max(4, int(1.0 * len(x) / 4))
        out = x.clone()
        for e, ex in enumerate(self.ex):
            idx = torch.eq(r, e).nonzero(as_tuple=True)[0][:cap]  # others overflow
            out[idx] = ex(x[idx])
        return self.o(out * v[:, None])


model = Switch()
optimizer = optim.Adam(model.parameters(), lr=1e-2)

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
