# Fine-tuning with batch normalization kept in eval mode from the loop on: equal, though the receipt names the layers.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randint(0, 3, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def set_bn_eval(module):
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.eval()

# %% accelerate
for epoch in range(2):
    model.train()
    model.apply(set_bn_eval)
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xb), yb).backward()
        optimizer.step()
