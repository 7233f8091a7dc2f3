# A model with a layer that nothing uses, and losses that use parameters its output was not computed from.
# outcome: equal
# compare: model, other, history
# %%
import torch
from torch import nn

torch.manual_seed(0)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(2, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.log_noise = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


model, other = Regression(), Regression()
x = torch.randn(10, 2)
y = x.sum(1, keepdim=True).sin()
history = []

# %% accelerate
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(4):
    optimizer.zero_grad()
    loss = (0.5 * (y - model(x)) ** 2 / model.log_noise.exp() ** 2 + model.log_noise).mean()
    loss.backward()
    optimizer.step()
    history.append(loss.item())

# %% accelerate
optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
for epoch in range(4):
    optimizer.zero_grad()
    loss = (y - other(x)).pow(2).mean()
    if epoch > 1:  # after a warm-up without it
        loss = loss + 0.1 * sum(value.pow(2).sum() for value in other.parameters())
    loss.backward()
    optimizer.step()
    history.append(loss.item())
