"""Models that print and store values of their batch: what they leave is that of one device, once for each call."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.recorded_run import Run, mlp, squared, train

STORED: dict[str, list[Any]] = {"means": [], "names": []}
NUM_CALLS = 0
BANK = torch.zeros(64, dtype=torch.float64)
COUNTS = numpy.zeros(4)
LARGE = torch.zeros(70_000_000)
"""More than what is copied before each pass."""


class Meter:
    def __init__(self) -> None:
        self.last: float | None = None
        self.sizes: deque[int] = deque(maxlen=100)

    def update(self, x: Tensor) -> None:
        self.last = x.mean().item()
        self.sizes.append(len(x))


def save_mean(x: Tensor) -> None:
    global NUM_CALLS
    NUM_CALLS += 1
    STORED["means"].append(x.mean().item())


def prints_values(model: Any, x: Tensor) -> None:
    print(f"variance {numpy.var(x.numpy()):.6f}")


def prints_shapes(model: Any, x: Tensor) -> None:
    print(x.shape)


def appends_to_a_global_list(model: Any, x: Tensor) -> None:
    save_mean(x)


def appends_the_same_for_all_rows(model: Any, x: Tensor) -> None:
    global NUM_CALLS
    NUM_CALLS += 1
    STORED["names"].append("forward")


def updates_a_meter(model: Any, x: Tensor) -> None:
    model.meter.update(x)


def fills_a_nested_container(model: Any, x: Tensor) -> None:
    model.stored["inner"].append(x.sum(1).numpy())


def writes_into_a_global_tensor(model: Any, x: Tensor) -> None:
    BANK[: len(x)] = x.sum(1)


def writes_into_a_large_tensor(model: Any, x: Tensor) -> None:
    LARGE[: len(x)] = x.sum(1)


def writes_into_a_global_array(model: Any, x: Tensor) -> None:
    COUNTS[0] += len(x)


def averages_into_an_attribute(model: Any, x: Tensor) -> None:
    model.average.mul_(0.9).add_(x.mean(), alpha=0.1)


EFFECTS = (
    prints_values, prints_shapes, appends_to_a_global_list, appends_the_same_for_all_rows, updates_a_meter,
    fills_a_nested_container, writes_into_a_global_tensor, writes_into_a_large_tensor, writes_into_a_global_array,
    averages_into_an_attribute,
)  # fmt: skip


class Observed(nn.Module):
    def __init__(self, observe: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.inner, self.meter = mlp(), Meter()
        self.stored: dict[str, list[Any]] = {"inner": []}
        self.average = torch.zeros((), dtype=torch.float64)  # no buffer
        self.observe = observe

    def forward(self, x: Tensor) -> Tensor:
        self.observe(self, x)
        return self.inner(x)


def leave(observe: Callable[[Any, Tensor], None]) -> list[Any]:
    """Train a model, and return what it has printed and stored."""
    global NUM_CALLS
    NUM_CALLS = 0
    for values in STORED.values():
        values.clear()
    BANK.zero_()
    LARGE[:64] = 0
    COUNTS[:] = 0
    torch.manual_seed(7)
    run, model = Run(), Observed(observe)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train(run, model, squared)
    stored = [value.tolist() for value in model.stored["inner"]]
    left = [{**STORED}, NUM_CALLS, model.meter.last, list(model.meter.sizes), stored]
    left += [BANK.tolist(), LARGE[:64].tolist(), COUNTS.tolist(), model.average.item(), run.weights]
    return [printed.getvalue(), *[repr(item) if isinstance(item, dict) else item for item in left]]


def on_workers(world: World) -> dict[str, tuple[list[Any], bool]]:
    found = {}
    for observe in EFFECTS:
        accelerator = Accelerator(world=world, cpu=True, config={"divide": "model"})
        cells = PlainCells(accelerator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with cells.run_cell():
                left = leave(observe)
        found[observe.__name__] = left, "Observed" in cells._divided_calls.divided
        accelerator.close()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[list[Any], bool]]:
    return run_ranks(on_workers, 2, timeout_s=100)[0]


@pytest.mark.parametrize("observe", EFFECTS)
def test_what_a_forward_leaves_is_that_of_one_device(observe: Any, found: Any) -> None:
    left, is_divided = found[observe.__name__]
    expected = leave(observe)
    assert left[:-1] == expected[:-1]
    assert left[-1] == pytest.approx(expected[-1], rel=1e-9)
    assert not is_divided, "code that changes its state may compute otherwise in a later call"
