# A loss takes an object of the notebook's model that computes its variance when it is first read, and can be called.
# outcome: equal
# compare: model, losses
# %%
import torch
import torch.nn as nn


class Gaussian:
    def __init__(self, mean, log_scale):
        self.mean, self.log_scale, self.stored = mean, log_scale, None

    def __call__(self):
        return self.mean + self.variance.sqrt() * torch.randn_like(self.mean)

    @property
    def variance(self):
        if self.stored is None:
            self.stored = (2 * self.log_scale).exp().expand_as(self.mean)
        return self.stored


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_scale = nn.Linear(4, 1), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return Gaussian(self.mean(x).squeeze(1), self.log_scale)


class Likelihood(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, found, y):
        variance = found.variance
        return 0.5 * ((y - found.mean) ** 2 / variance + variance.log()).sum() / len(found.mean)


x, y = torch.randn(12, 4), torch.randn(12)
model = Predictor()
likelihood = Likelihood(model)
optimizer = torch.optim.SGD(likelihood.parameters(), lr=0.1)
losses = []

# %% accelerate
for _ in range(3):
    optimizer.zero_grad()
    loss = likelihood(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
