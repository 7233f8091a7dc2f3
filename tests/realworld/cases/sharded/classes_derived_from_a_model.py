# A library makes a functional copy of a model, of a class that is derived from the model's class.
# outcome: refused derived from the class of a sharded Linear
# compare: layer
# %%
import torch
import torch.nn as nn

x, y = torch.randn(12, 3), torch.randn(12, 1)
layer = nn.Linear(3, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)


def functional(module):
    class Functional(type(module)):
        def __init__(self):
            nn.Module.__init__(self)
            self.fast = [value.detach().clone().requires_grad_() for value in module.parameters()]

        def forward(self, x):
            return nn.functional.linear(x, *self.fast)

    return Functional()


# %% accelerate --strategy fsdp
for _ in range(2):
    inner = functional(layer)
    slopes = torch.autograd.grad(nn.functional.mse_loss(inner(x), y), inner.fast)
    optimizer.zero_grad()
    (nn.functional.mse_loss(layer(x), y) + sum(slope.pow(2).sum() for slope in slopes)).backward()
    optimizer.step()
