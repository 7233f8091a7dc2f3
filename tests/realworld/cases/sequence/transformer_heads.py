# Transformer heads.
# outcome: equal
# compare: losses, model, optimizer
# %%
import math

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randint(0, 20, (64, 10))
Y = torch.randint(0, 2, (64,))
loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)


class TransformerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 32)
        layer = nn.TransformerEncoderLayer(32, nhead=8, dim_feedforward=64, dropout=0.2)
        self.enc = nn.TransformerEncoder(layer, 2)
        self.fc = nn.Linear(32, 2)

    def forward(self, src):  # src: [T, B]
        h = self.enc(self.emb(src) * math.sqrt(32))
        return self.fc(h.mean(0))


model = TransformerModel()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.t()), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
