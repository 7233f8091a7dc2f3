# Gradients of scores with respect to the features that the same call returned: kept, in a penalty, and in hooks.
# outcome: equal
# compare: model, maps, sizes, penalties
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        features = torch.tanh(self.features(x))
        return self.head(features.mean((2, 3))).tanh(), features


model = Scores()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(9, 1, 6, 6), torch.arange(9) % 3
sizes, penalties = [], []

# %% accelerate
for _ in range(2):
    scores, features = model(x)
    (slope,) = torch.autograd.grad(scores.square().sum(), features, create_graph=True)
    penalties.append(slope.square().sum())
    loss = F.cross_entropy(scores, y) + penalties[-1] + features.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
penalties = [value.item() for value in penalties]

# %% accelerate
for _ in range(2):
    scores, features = model(x)
    features.register_hook(lambda gradient: sizes.append(gradient.norm().item()))
    features.register_hook(lambda gradient: 2 * gradient)
    loss = F.cross_entropy(scores, y) + features.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% accelerate
scores, features = model(x)
features.retain_grad()
(scores.max(1)[0].sum() + features.sum()).backward()
maps = (features.grad.mean((2, 3), keepdim=True) * features).sum(1).detach()
optimizer.zero_grad()
