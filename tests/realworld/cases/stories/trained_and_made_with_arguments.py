# A module whose class needs arguments to be made, as averages of weights in packages do: made and trained in one cell.
# outcome: equal
# compare: average
# %%
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Average(nn.Module):
    def __new__(cls, model, *args, **kwargs):
        return super().__new__(cls)

    def __init__(self, model, decay=0.9):
        super().__init__()
        self.model, self.decay = model, decay
        self.average = copy.deepcopy(model).requires_grad_(False)

    def forward(self, x):
        return self.model(x)

    @torch.no_grad()
    def update(self):
        for mean, value in zip(self.average.parameters(), self.model.parameters()):
            mean.lerp_(value, 1 - self.decay)


loader = DataLoader(TensorDataset(torch.randn(30, 4), torch.randn(30, 2)), 6, shuffle=True)

# %% accelerate
average = Average(nn.Linear(4, 2))
optimizer = torch.optim.SGD(average.model.parameters(), 0.1)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(average(x), y).backward()
    optimizer.step()
    average.update()
