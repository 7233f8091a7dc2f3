# An optimizer that steps another one with the closure that it gets, and then moves slow weights.
# outcome: equal
# compare: model, outer.slow, losses
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

x, y = torch.randn(32, 4), torch.randn(32, 1)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
losses = []


class SlowWeights(torch.optim.Optimizer):
    def __init__(self, inner, every):
        params = [p for group in inner.param_groups for p in group["params"]]
        super().__init__(params, {})
        self.inner, self.every, self.num_steps = inner, every, 0
        self.slow = [p.detach().clone() for p in params]

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)
        return loss


inner = torch.optim.SGD(model.parameters(), lr=0.1)
outer = SlowWeights(inner, every=2)
schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.8)

# %% accelerate
for rows in torch.arange(32).split(8):

    def closure():
        outer.zero_grad()
        loss = F.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        return loss

    losses.append(outer.step(closure).item())
    schedule.step()

# %% accelerate
for rows in torch.arange(32).split(8):
    loss = F.mse_loss(model(x[rows]), y[rows])
    outer.zero_grad()
    loss.backward()
    outer.step()
