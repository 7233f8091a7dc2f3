# Custom operators of the notebook that cells call only as torch.ops.package.name, one of them in a layer.
# outcome: equal
# compare: weight
# %%
import torch
from torch import Tensor, nn

FACTOR = 0.5


@torch.library.custom_op("places_of_operators::scaled", mutates_args=())
def scaled_op(x: Tensor, factor: float) -> Tensor:
    return x * factor


def setup_context(ctx, inputs, output):
    ctx.factor = inputs[1]


def backward(ctx, gradient):
    return gradient * ctx.factor, None


scaled_op.register_autograd(backward, setup_context=setup_context)


@torch.library.custom_op("places_of_operators::shifted", mutates_args=())
def shifted_op(x: Tensor) -> Tensor:
    return x + FACTOR


class Scaled(nn.Module):
    def forward(self, x):
        return torch.ops.places_of_operators.scaled(x, 2.0)


torch.manual_seed(0)
x, y = torch.randn(16, 4), torch.randn(16, 1)
model = nn.Sequential(nn.Linear(4, 1), Scaled())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for _ in range(3):
    loss = (model(torch.ops.places_of_operators.shifted(x)) - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
weight = model[0].weight.detach()
