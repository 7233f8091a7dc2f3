"""Programs whose model changes its arguments, returns them, or returns one tensor several times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


OF_ARGUMENTS = [
    rows_written_in_place, rows_written_in_inference_mode, memory_written_in_place,
    rows_that_begin_to_require_gradients, items_added_to_the_argument, items_removed_from_the_argument,
    one_tensor_returned_twice, gradients_by_torch_func_inside, features_with_retained_gradients,
]  # fmt: skip
