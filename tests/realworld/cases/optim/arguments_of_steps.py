# Optimizers whose step takes the loss and returns the size of the step.
# outcome: equal
# compare: model, sizes
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

x, y = torch.randn(32, 4), torch.randn(32, 1)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
sizes = []


class PolyakStep(torch.optim.Optimizer):
    def __init__(self, params, largest=1.0):
        super().__init__(params, {"largest": largest})

    @torch.no_grad()
    def step(self, loss, scale=1.0):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = sum(p.grad.square().sum() for p in params)
        size = scale * min(float(loss / norm), self.param_groups[0]["largest"])
        for p in params:
            p.sub_(size * p.grad)
        return size


optimizer = PolyakStep(model.parameters())

# %% accelerate
for rows in torch.arange(32).split(8):
    loss = F.mse_loss(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    sizes.append(optimizer.step(loss.detach()))
    sizes.append(optimizer.step(loss=loss.detach(), scale=0.1))
