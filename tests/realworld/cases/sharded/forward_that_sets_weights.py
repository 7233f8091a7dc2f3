# A layer of a sharded model that sets its own weights by the first batch, through their data.
# outcome: refused is changed by the model's own code
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Whitening(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.ones(size))
        self.is_set = False

    def forward(self, x):
        if not self.is_set:
            self.shift.data.copy_(-x.detach().mean(0))
            self.scale.data.copy_(1 / x.detach().std(0))
            self.is_set = True
        return self.scale * (x + self.shift)


x, y = torch.randn(40, 4) * 3 + 1, torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(Whitening(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate --strategy fsdp
for xb, yb in loader:
    loss = nn.functional.mse_loss(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
