"""Programs with a model that each rank must call with whole batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.recorded_run import Run, loader, mlp, sgd, squared, train


def samples_mixed_inside(run: Run) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x - x.mean(0))

    train(run, Centred(), squared)


def value_stored_by_the_model(run: Run) -> None:
    class Storing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.penalty: Any = None

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            self.penalty = out.square().mean().sqrt()
            return out

    train(run, Storing(), lambda model, x, y, label: F.mse_loss(model(x), y) + model.penalty)


def codebook_in_buffers(run: Run) -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("mean", torch.zeros(1).double())

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
            return out - self.mean

    train(run, Averaging(), squared)


def codebook_in_parameters(run: Run) -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.mean = nn.Parameter(torch.zeros(1).double())

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            self.mean = nn.Parameter(0.9 * self.mean + 0.1 * out.mean(0))
            return out - self.mean.detach()

    train(run, Averaging(), squared)


def parameter_written_by_the_model(run: Run) -> None:
    class Centering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.mean = nn.Parameter(torch.zeros(1).double(), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            self.mean.data.mul_(0.9).add_(0.1 * out.detach().mean(0))
            return out - self.mean

    train(run, Centering(), squared)


def statistics_in_parameters(run: Run) -> None:
    """Normalize by a function whose running statistics are parameters, as code of meta-learning does."""

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.mean = nn.Parameter(torch.zeros(6).double(), requires_grad=False)
            self.variance = nn.Parameter(torch.ones(6).double(), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(F.batch_norm(x, self.mean, self.variance, training=True))

    train(run, Normalized(), squared)


def embedding_of_limited_norm(run: Run) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Embedding(3, 6, max_norm=0.5, dtype=torch.float64)
            self.inner = mlp()

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            return self.inner(x * self.codes(label))

    train(run, Bag(), lambda model, x, y, label: F.mse_loss(model(x, label), y).sqrt())


def tensor_that_is_no_parameter(run: Run) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.scale = torch.ones(6, dtype=torch.float64, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.scale * x)

    model = Scaled()
    run.models.append(model)
    optimizers = sgd(model), torch.optim.SGD([model.scale], lr=0.1)
    x, y, _ = (torch.stack(column) for column in zip(*loader().dataset, strict=True))
    for start in (0, 8, 16):
        F.mse_loss(model(x[start : start + 8]), y[start : start + 8]).sqrt().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.print(model.scale.sum())


def loss_that_compares_inside(run: Run) -> None:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(outputs=4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            code = F.normalize(self.inner(x))
            return F.cross_entropy(code @ code.T / 0.1 + y @ y.T, torch.arange(len(x)))

    train(run, Contrastive(), lambda model, x, y, label: model(x, y))


def hooks_on_parameters(run: Run) -> None:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    train(run, model, squared)


def submodules_called_directly(run: Run) -> None:
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 3), nn.Linear(3, 6)

    def loss_of(model: Any, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        code = model.encoder(x)
        return (model.decoder(code - code.mean(0)) - x).norm()

    train(run, Auto().double(), loss_of)


def other_parameters(run: Run) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        names, values = zip(*model.named_parameters(), strict=True)
        slopes = torch.autograd.grad(F.mse_loss(model(x), y), values, create_graph=True)
        fast = {name: value - 0.1 * slope for name, value, slope in zip(names, values, slopes, strict=True)}
        return F.mse_loss(torch.func.functional_call(model, fast, (x,)), y)

    train(run, mlp(), loss_of)


def branch_on_the_batch(run: Run) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = mlp(), mlp(nn.BatchNorm1d(10))
            self.num_calls = nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.num_calls += 1
            return self.high(x) if x.sum() > 3 else self.low(x)

    train(run, Two(), squared)


def training_inside_of_the_call(run: Run) -> None:
    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.optimizers = [torch.optim.Adam(self.parameters(), lr=0.01)]

        def forward(self, x: Tensor) -> Tensor:
            loss = self.inner(x).square().mean()
            loss.backward()
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
            return self.inner(x)

    train(run, Training(), squared)


UNDIVIDED = [
    training_inside_of_the_call,
    branch_on_the_batch,
    samples_mixed_inside, value_stored_by_the_model, codebook_in_buffers, loss_that_compares_inside,
    tensor_that_is_no_parameter, codebook_in_parameters, parameter_written_by_the_model, statistics_in_parameters,
    embedding_of_limited_norm,
    hooks_on_parameters, submodules_called_directly, other_parameters,
]  # fmt: skip
