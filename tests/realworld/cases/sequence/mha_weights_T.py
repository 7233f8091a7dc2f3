# Mha weights t.
# outcome: equal
# compare: model, losses, optimizer
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(96, 16, 8)
Y = torch.randint(0, 2, (96,))
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)


class Att(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        h, w = self.attn(x, x, x)
        return self.fc(h.mean(1))


model = Att()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
