# Inverses of transforms come back, also where a library keeps them in the state of the transform, as Pyro does.
# outcome: equal
# compare: values, model
# %%
import torch
import torch.nn as nn
from torch.distributions import ExpTransform, LogNormal, TransformedDistribution, Transform


class Prior(nn.Module):
    def __init__(self):
        super().__init__()
        self.location = nn.Parameter(torch.zeros(3))
        self.to_real = ExpTransform().inv

    def forward(self, x):
        return TransformedDistribution(LogNormal(self.location, 1.0), [self.to_real]).log_prob(self.to_real(x))


Transform.__getstate__ = lambda transform: dict(vars(transform))
model = Prior()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.rand(8, 3) + 0.5

# %% accelerate
for _ in range(2):
    optimizer.zero_grad()
    (-model(x).mean()).backward()
    optimizer.step()
inverse = ExpTransform().inv
transforms = {"rate": ExpTransform().inv, "scale": ExpTransform()}

# %%
one = torch.ones(())
values = [float(inverse(one)), float(transforms["rate"](one)), float(transforms["scale"].inv(one))]
assert transforms["rate"].inv.inv is transforms["rate"]
