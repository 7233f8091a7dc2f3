# Arange lengths.
# outcome: equal
# compare: model, losses
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

L = torch.tensor([6] * 8 + [4] * 4 + [3] * 4).repeat(4)
X = torch.randn(64, 6, 4)
Y = torch.randn(64, 1)
batches = [(X[i : i + 16], L[i : i + 16], Y[i : i + 16]) for i in range(0, 64, 16)]


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.a = nn.Linear(8, 1)
        self.o = nn.Linear(8, 1)

    def forward(self, x, lengths):
        mask = torch.arange(lengths.max())[None, :] < lengths[:, None]
        h = torch.tanh(self.f(x[:, : mask.size(1)]))
        w = self.a(h).squeeze(2).masked_fill(~mask, -1e9).softmax(1)
        return self.o((w[..., None] * h).sum(1)), w


model = Pool()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
losses = []

# %% accelerate
for epoch in range(2):
    for x, l, y in batches:
        out, w = model(x, l)
        loss = F.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, losses[-1], tuple(w.shape))
