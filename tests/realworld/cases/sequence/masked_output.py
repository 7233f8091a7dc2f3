# Masked output.
# outcome: equal
# compare: model, losses
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(64, 6, 4)
M = torch.ones(64, 6, dtype=torch.bool)
Y = torch.randint(0, 2, (64, 6))
M[20:, 4:] = False
M[40:, 3:] = False
loader = DataLoader(TensorDataset(X, M, Y), batch_size=16)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.o = nn.Linear(8, 2)

    def forward(self, x, mask):
        return self.o(torch.tanh(self.f(x))[mask])  # logits of valid tokens only


model = Tagger()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
losses = []

# %% accelerate
for epoch in range(2):
    for x, m, y in loader:
        loss = F.cross_entropy(model(x, m), y[m])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, losses[-1])
