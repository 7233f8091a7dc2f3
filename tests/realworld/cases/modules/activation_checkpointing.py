# torch.utils.checkpoint inside the model's forward.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


x, y = torch.randn(40, 6), torch.randint(0, 2, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = Deep()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(xb), yb).backward()
    optimizer.step()
