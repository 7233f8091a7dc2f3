# A loader with batch_size=None over single samples: nothing is divided.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Signals(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(9)
        self.signals = [torch.randn(6, 4, generator=g) for _ in range(9)]

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, i):
        return self.signals[i], self.signals[i].cumsum(0)[:, :1]


loader = DataLoader(Signals(), batch_size=None, shuffle=False)
model = nn.GRU(4, 8)
head = nn.Linear(8, 1)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

# %% accelerate
for epoch in range(2):
    for signal, target in loader:
        output, _ = model(signal)
        loss = nn.functional.mse_loss(head(output), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
