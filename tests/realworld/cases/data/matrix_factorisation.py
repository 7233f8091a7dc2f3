# Collaborative filtering: user and item embeddings with biases, implicit feedback with negatives fixed before.
# outcome: equal
# compare: model, hit_rate
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

users, items = torch.randint(0, 10, (70,)), torch.randint(0, 15, (70,))
negatives = torch.randint(0, 15, (70,))
loader = DataLoader(TensorDataset(users, items, negatives), batch_size=16, shuffle=True)


class MF(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(10, 4), nn.Embedding(15, 4)
        self.bias = nn.Embedding(15, 1)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1) + self.bias(i).squeeze(1)


model = MF()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for u, i, j in loader:
        bpr = -F.logsigmoid(model(u, i) - model(u, j)).mean()
        optimizer.zero_grad()
        bpr.backward()
        optimizer.step()
with torch.no_grad():
    hit_rate = (model(users, items) > model(users, negatives)).double().mean().item()
