# A hypernetwork that makes the weights of the main network from a task vector.
# outcome: equal
# compare: hyper
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x, task, y = torch.randn(40, 3), torch.randn(40, 2), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, task, y), batch_size=8)


class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3 * 4 + 4))
        self.readout = nn.Linear(4, 1)

    def forward(self, x, task):
        made = self.make(task)
        weight, bias = made[:, :12].view(-1, 4, 3), made[:, 12:]
        hidden = torch.tanh(torch.bmm(weight, x.unsqueeze(2)).squeeze(2) + bias)
        return self.readout(hidden)


hyper = Hyper()
optimizer = torch.optim.SGD(hyper.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, tb, yb in loader:
        loss = F.mse_loss(hyper(xb, tb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
