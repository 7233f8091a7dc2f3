"""Programs whose model changes its arguments, returns them or one tensor several times, or takes unusual tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.ranks.recorded_run import Run, loader, mlp, sgd, squared, train


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()


def rows_written_in_place(run: Run) -> None:
    class Scaling(_Inner):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.mul_(0.5))

    train(run, Scaling(), lambda model, x, y, label: F.mse_loss(model(x), y) + x.norm())


def rows_written_in_inference_mode(run: Run) -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 1)).double()
    train(run, model, lambda model, x, y, label: squared(model, x.clone(), y, label))
    with torch.inference_mode():
        for x, _, _ in loader():
            run.print(model(x).norm() + x.norm())


def memory_written_in_place(run: Run) -> None:
    class Remembering(_Inner):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            memory.add_(1.0)
            return self.inner(x) + memory.mean()

    memory = torch.zeros(3, dtype=torch.float64)
    train(run, Remembering(), lambda model, x, y, label: F.mse_loss(model(x, memory), y).sqrt())
    run.print(memory.sum())


def rows_that_begin_to_require_gradients(run: Run) -> None:
    class Energy(_Inner):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.requires_grad_())

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        energy = model(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return F.mse_loss(energy, y) + force.square().mean()

    train(run, Energy(), loss_of)


def items_added_to_the_argument(run: Run) -> None:
    class Adding(_Inner):
        def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
            data["out"] = self.inner(data["x"])
            return data

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        data = {"x": x}
        model(data)
        return F.mse_loss(data["out"], y).sqrt()

    train(run, Adding(), loss_of)


def items_removed_from_the_argument(run: Run) -> None:
    class Removing(_Inner):
        def forward(self, data: dict[str, Tensor]) -> Tensor:
            target = data.pop("y")
            return F.mse_loss(self.inner(data["x"]), target)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        data = {"x": x, "y": y}
        loss = model(data)
        run.print(len(data))
        return loss

    train(run, Removing(), loss_of)


def one_tensor_returned_twice(run: Run) -> None:
    class Twice(_Inner):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            found = self.inner(x)
            return {"first": found, "second": found, "x": x}

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        out = model(x)
        run.print(float(out["x"] is x))
        out["first"].mul_(2)
        return F.mse_loss(out["second"], y).sqrt()

    train(run, Twice(), loss_of)


def gradients_by_torch_func_inside(run: Run) -> None:
    class Sloped(_Inner):
        def forward(self, x: Tensor) -> Tensor:
            slopes = torch.func.vmap(torch.func.grad(lambda row: self.inner(row).sum()))(x)
            return self.inner(x) + slopes.sum(1, keepdim=True)

    train(run, Sloped(), squared)


def features_with_retained_gradients(run: Run) -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 4).double(), nn.Linear(4, 1).double()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = self.body(x).tanh()
            return features, self.head(features)

    model: Any = Features()
    run.models.append(model)
    optimizer = sgd(model)
    for x, y, _ in loader():
        features, out = model(x)
        features.retain_grad()
        features.retain_grad()
        optimizer.zero_grad()
        (F.mse_loss(out, y) + features.square().mean()).backward(retain_graph=True)
        run.print(features.grad.norm())
        F.mse_loss(out, y).sqrt().backward(retain_graph=True)
        run.print(features.grad.norm())
        features.grad = None
        F.l1_loss(out, y).backward()
        assert features.grad is not None
        run.print(features.grad.norm())
        optimizer.step()


class _Reading(_Inner):
    """Computes with tensors of any kind."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_nested:
            x = torch.nested.to_padded_tensor(x, 0.0)
        return self.inner(x.real + x.imag if x.is_complex() else x.to_dense())


def _batches_of(convert: Callable[[Tensor], Tensor]) -> DataLoader[Any]:
    def collate(samples: list[tuple[Tensor, ...]]) -> list[Tensor]:
        x, *others = map(torch.stack, zip(*samples, strict=True))
        return [convert(x), *others]

    return loader(collate_fn=collate)


def sparse_batches(run: Run) -> None:
    train(run, _Reading(), squared, _batches_of(Tensor.to_sparse))


def nested_batches(run: Run) -> None:
    train(run, _Reading(), squared, _batches_of(lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged)))


def conjugated_batches_and_outputs(run: Run) -> None:
    class Conjugating(_Reading):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(super().forward(x), x.real[:, :1]).conj()

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return (model(x) - y).abs().square().mean()

    train(run, Conjugating(), loss_of, _batches_of(lambda x: torch.fft.fft(x).conj()))


def backward_passes_from_nothing(run: Run) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        torch.autograd.backward([])
        return squared(model, x, y, label)

    train(run, mlp(), loss_of)


class _Settings(dict[str, float]):
    """Attributes as items; one that is absent raises another error than Python expects."""

    def __getattr__(self, name: str) -> float:
        return self[name]


def settings_that_raise_errors_of_their_own(run: Run) -> None:
    settings = _Settings(rate=0.5)

    class Scaled(_Inner):
        options = settings

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.options.rate

    model = Scaled()
    run.models.append(model)
    optimizer = sgd(model)
    for x, y, _ in loader():
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * settings.rate).backward()
        optimizer.step()


OF_ARGUMENTS = [
    rows_written_in_place, rows_written_in_inference_mode, memory_written_in_place,
    rows_that_begin_to_require_gradients, items_added_to_the_argument, items_removed_from_the_argument,
    one_tensor_returned_twice, gradients_by_torch_func_inside, features_with_retained_gradients,
    sparse_batches, nested_batches, conjugated_batches_and_outputs, backward_passes_from_nothing,
    settings_that_raise_errors_of_their_own,
]  # fmt: skip
