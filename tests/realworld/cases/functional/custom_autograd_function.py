# A custom autograd.Function (a Legendre polynomial) inside a module, trained on the whole data.
# outcome: equal
# compare: model
# runs: always
# %%
import math
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class LegendrePolynomial3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * (5 * x ** 3 - 3 * x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * 1.5 * (5 * x ** 2 - 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((), 0.1)), nn.Parameter(torch.full((), -0.5))
        self.c, self.d = nn.Parameter(torch.full((), 0.0)), nn.Parameter(torch.full((), 0.3))

    def forward(self, x):
        return self.a + self.b * LegendrePolynomial3.apply(self.c + self.d * x)


x = torch.linspace(-math.pi, math.pi, 60)
loader = DataLoader(TensorDataset(x, torch.sin(x)), batch_size=16, shuffle=True)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

# %% accelerate
for epoch in range(3):
    for xb, yb in loader:
        loss = (model(xb) - yb).pow(2).sum()
        optimizer.zero_grad()
        (loss / 60).backward()
        optimizer.step()
