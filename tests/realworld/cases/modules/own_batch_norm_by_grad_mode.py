# A batch norm written by hand, which takes the grad mode for the mode of training.
# outcome: equal
# compare: model, norm.mean, norm.variance
# runs: always
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class BatchNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width))
        self.mean, self.variance = torch.zeros(width), torch.ones(width)

    def forward(self, x):
        mean, variance = self.mean, self.variance
        if torch.is_grad_enabled():
            mean, variance = x.mean(0), x.var(0, unbiased=False)
            self.mean = (0.9 * self.mean + 0.1 * mean).detach()
            self.variance = (0.9 * self.variance + 0.1 * variance).detach()
        return self.gamma * (x - mean) / (variance + 1e-5).sqrt() + self.beta


x, y = torch.randn(90, 5), torch.randint(0, 3, (90,))
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
norm = BatchNorm(8)
model = nn.Sequential(nn.Linear(5, 8), norm, nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        optimizer.step()
    with torch.no_grad():
        print((model(x).argmax(1) == y).sum().item())
