# Operators of torch.library.custom_op that a plain cell, an accelerated cell and a module define; one writes in place.
# outcome: equal
# compare: model, out, counts
# %%
import os
import sys

import torch
from torch import Tensor, nn


@torch.library.custom_op("of_notebook::scale", mutates_args=())
def scale(x: Tensor, by: float) -> Tensor:
    return x * by


@scale.register_fake
def _(x, by):
    return torch.empty_like(x)


def keep_factor(ctx, inputs, output):
    ctx.by = inputs[1]


def backward(ctx, gradient):
    return gradient * ctx.by, None


scale.register_autograd(backward, setup_context=keep_factor)


@torch.library.custom_op("of_notebook::count", mutates_args=("counts",))
def count(counts: Tensor, step: int) -> None:
    counts[step] += 1


with open("operators_of_a_module.py", "w") as file:
    file.write(
        "import torch\n\n\n@torch.library.custom_op('of_module::shift', mutates_args=())\n"
        "def shift(x: torch.Tensor, by: float) -> torch.Tensor:\n    return x + by\n"
    )
sys.path.insert(0, os.getcwd())
from operators_of_a_module import shift

x, y = torch.randn(16, 4), torch.randn(16, 1)
counts = torch.zeros(3)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for step in range(3):
    loss = nn.functional.mse_loss(scale(model(shift(x, 1.0)), 2.0), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    count(counts, step)


@torch.library.custom_op("of_notebook::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    return x / 2


# %%
out = halve(scale(x, 3.0))
