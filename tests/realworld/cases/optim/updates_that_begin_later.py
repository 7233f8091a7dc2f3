# An optimizer that only decays weights in its first steps, as a rectified Adam does, and one that steps every third time.
# outcome: equal
# compare: model, other
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Later(torch.optim.SGD):
    def __init__(self, params, first, every, decay):
        super().__init__(params, lr=0.1)
        self.first, self.every, self.decay, self.calls = first, every, decay, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for value in group["params"]:
                value.mul_(1 - self.decay)
        if self.calls >= self.first and self.calls % self.every == 0:
            super().step()


x, y = torch.randn(42, 4), torch.randn(42, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, other = (nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2))
optimizers = [Later(model.parameters(), 5, 1, 0.01), Later(other.parameters(), 1, 3, 0.0)]

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        for net, optimizer in zip((model, other), optimizers):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(xb), yb).backward()
            optimizer.step()
