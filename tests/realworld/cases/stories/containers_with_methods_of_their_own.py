# A class that inherits from tuple, and whose methods raise, as those of mathematical objects do.
# outcome: equal
# compare: model, kept, sizes
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Degree(tuple):
    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError

    @property
    def dim(self):
        return 2 * tuple.__getitem__(self, 0) + 1


class Layers(nn.Module):
    def __init__(self, degrees):
        super().__init__()
        self.degrees = degrees
        self.layers = nn.ModuleList(nn.Linear(4, degree.dim) for degree in degrees)

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.layers], -1)


model = Layers([Degree((1, 1)), Degree((0, 1))])
loader = DataLoader(TensorDataset(torch.randn(30, 4), torch.randn(30, 4)), 6, shuffle=True)
kept, sizes = [model.degrees[0]], []
optimizer = torch.optim.SGD(model.parameters(), 0.1)

# %% accelerate
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
sizes = [kept[0].dim]
kept = kept[0] is model.degrees[0]
