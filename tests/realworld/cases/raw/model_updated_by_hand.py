# A module whose parameters are updated by hand under no_grad, batches from a loader.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(45, 4), torch.randint(0, 3, (45,))
train_dl = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)


class Logistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, 3) / 2)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, xb):
        return xb @ self.weights + self.bias


model = Logistic()
lr = 0.2

# %% accelerate
for epoch in range(2):
    for xb, yb in train_dl:
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= p.grad * lr
            model.zero_grad()
