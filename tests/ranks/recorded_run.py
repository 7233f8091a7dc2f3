"""What a training program prints and trains, and the small models and data of such programs."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

Values = list[float]


class Run:
    """What a program trains and prints."""

    def __init__(self) -> None:
        self.printed: Values = []
        self.models: list[nn.Module] = []
        # In a buffer: a model that appends to a list is not divided, since the list then depends on the batch.
        self.row_counts = io.StringIO()

    def print(self, value: Tensor | float) -> None:
        self.printed.append(value.item() if isinstance(value, Tensor) else float(value))

    @property
    def weights(self) -> Values:
        states = [value for model in self.models for value in model.state_dict().values()]
        return torch.cat([value.double().flatten() for value in states]).tolist()


def loader(num_samples: int = 27, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(num_samples, 1, generator=generator, dtype=torch.float64)
    label = torch.randint(3, (num_samples,), generator=generator)
    return DataLoader(TensorDataset(x, y, label), batch_size=batch_size, **options)


def mlp(*extra: nn.Module, outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), *extra, nn.Tanh(), nn.Linear(10, outputs)).double()


def sgd(*models: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([value for model in models for value in model.parameters()], lr=lr, momentum=0.5)


def train(run: Run, model: nn.Module, loss_of: Callable[..., Tensor], data: DataLoader[Any] | None = None) -> None:
    run.models.append(model)
    optimizer = sgd(model)
    for _ in range(2):
        for x, y, label in data or loader(shuffle=True):
            loss = loss_of(model, x, y, label)
            run.print(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def squared(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    return F.mse_loss(model(x), y).sqrt()
