# A sampler that counts its finished epochs, read by worker processes; the loop reads the count.
# outcome: equal
# compare: model, sampler.finished, rates
# %%
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Sampler, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)


class Rounds(Sampler):
    def __init__(self):
        self.finished = 0

    def __iter__(self):
        yield from torch.randperm(128).tolist()[: 64 + 32 * self.finished]
        self.finished += 1

    def __len__(self):
        return 64 + 32 * self.finished


sampler = Rounds()
loader = DataLoader(TensorDataset(X, Y), batch_size=32, sampler=sampler, num_workers=1)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
rates = []

# %% accelerate
for epoch in range(3):
    for x, y in loader:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + sampler.finished)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
print(rates)
