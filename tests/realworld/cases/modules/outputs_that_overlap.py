# Outputs that share memory, one of which is changed in place: views of rows, of a recurrent layer, with another output.
# outcome: equal
# compare: models, losses
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = self.layer(x)
        return h, h[:, 0], h.detach()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        out, _ = self.rnn(x)
        return out[:, -1], out


class Scored(Features):
    def forward(self, x):
        h = self.layer(x)
        first = h[:, 0]
        return h, first, first.sum(1), h[..., 4:]


x, y = torch.randn(24, 5, 4), torch.randn(24, 1)
models = [Features(), Recurrent(), Scored()]
losses = []

# %% accelerate
for model in models:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(0, 24, 8):
        optimizer.zero_grad()
        one, other, *others = model(x[i : i + 8])
        one.mul_(2)
        loss = F.mse_loss(model.head(one if one.dim() == 2 else other), y[i : i + 8]) + 0.1 * (other - 1).square().mean()
        loss = loss + sum(value.sum() for value in others) / 100
        losses += [loss.item(), other.sum().item()]
        loss.backward()
        optimizer.step()
