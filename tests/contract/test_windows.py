"""Windows, weights and schedules on N workers against one careful process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.errors import MisuseError
from accel_nb.runtime.world import World
from tests.contract.recipes import COARSE, EXACT, WORLDS, dtype_of, tolerance
from tests.ranks.launch import run_ranks

TOKENS, CLASSES = 5, 3


def parts(
    num_samples: int = 13, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(7)
    model = nn.Linear(2, CLASSES, dtype=torch.float64).to(dtype)
    x = torch.randn(num_samples, TOKENS, 2, dtype=torch.float64).to(dtype)
    y = torch.randint(CLASSES, (num_samples, TOKENS))
    y[torch.rand(num_samples, TOKENS) < 0.5] = -100
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), TensorDataset(x, y)


def flat(model: nn.Module) -> list[float]:
    return torch.cat([value.detach().flatten() for value in model.parameters()]).tolist()


def sum_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


def weighted(
    world: World,
    strategy: str,
    accumulate: int,
    batch: int,
    tail: str = "step",
    meaning: Any = "per-worker",
    clip: float | None = None,
) -> list[float]:
    """Train with token weights; micro-batches of ``batch`` samples for each worker."""
    model, optimizer, data = parts(dtype=dtype_of(strategy))
    accelerator = Accelerator(
        world=world, cpu=True, gradient_accumulation_steps=accumulate, batch=meaning,
        config={"accumulation": {"tail": tail}}, strategy=strategy,
    )  # fmt: skip
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=batch))
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate():
                accelerator.backward(sum_of(model, x, y), weight=(y >= 0).sum())
                if clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.close()
    return flat(model)


def big_batches(sizes: list[list[int]], clip: float | None = None) -> list[float]:
    """Train one plain process on windows of samples, each as one batch; ``sizes`` are the windows of each epoch."""
    model, optimizer, data = parts()
    for windows in sizes:
        start = 0
        for size in windows:
            x, y = (torch.cat([part, part])[start : start + size] for part in data.tensors)
            optimizer.zero_grad()
            (sum_of(model, x, y) / (y >= 0).sum()).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            start += size
    return flat(model)


def each_weighted(world: World, strategy: str, given: list[tuple[Any, ...]]) -> list[list[float]]:
    """Train once for each of ``given``, in one world."""
    return [weighted(world, strategy, *args) for args in given]


def on_ranks(strategy: str, size: int, given: list[tuple[Any, ...]]) -> list[list[list[float]]]:
    if size == 1:
        return [each_weighted(World(), strategy, given)]
    return run_ranks(each_weighted, size, strategy, given)


@pytest.mark.parametrize(("strategy", "size"), EXACT + [place for place in COARSE if place[1] == 2])
def test_token_weights_give_the_gradient_of_one_big_batch(strategy: str, size: int) -> None:
    grid = list(itertools.product((1, 2, 3), (None, 0.05))) if (strategy, size) in EXACT else [(2, 0.05)]
    found = on_ranks(strategy, size, [(accumulate, 2, "step", "per-worker", clip) for accumulate, clip in grid])
    for number, (accumulate, clip) in enumerate(grid):
        window = 2 * size * accumulate
        epoch = [min(window, 13 - start) for start in range(0, 13, window)]
        expected = pytest.approx(big_batches([epoch, epoch], clip), abs=tolerance(strategy, 1e-10))
        for weights in found:
            assert weights[number] == expected, (accumulate, clip)


@pytest.mark.parametrize(("strategy", "size"), [place for place in WORLDS if place[1] < 3])
def test_a_window_cut_short_is_carried_or_dropped_as_asked(strategy: str, size: int) -> None:
    # Seven batches of the whole world in an epoch make two windows of four: one whole, one cut short.
    for dropped, carried_on in on_ranks(strategy, size, [(4, 2 // size, tail) for tail in ("drop", "carry")]):
        assert dropped == pytest.approx(big_batches([[8], [8]]), abs=tolerance(strategy, 1e-10))
        assert carried_on == pytest.approx(carried(), abs=tolerance(strategy, 1e-10))


def carried() -> list[float]:
    """Seven micro-batches in each of two epochs (six of two samples, one of one), stepped after every four."""
    model, optimizer, data = parts()
    x, y = (torch.cat([part, part]) for part in data.tensors)
    edges = [0, 2, 4, 6, 8, 10, 12, 13, 15, 17, 19, 21, 23, 25, 26]
    for number in range(3):
        start, stop = edges[number * 4], edges[number * 4 + 4]
        optimizer.zero_grad()
        (sum_of(model, x[start:stop], y[start:stop]) / (y[start:stop] >= 0).sum()).backward()
        optimizer.step()
    return flat(model)


def some_with_and_some_without(world: World) -> str:
    model, optimizer, data = parts()
    accelerator = Accelerator(world=world, cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = data[:4]
    try:
        for weight in (3, None):
            with accelerator.accumulate():
                accelerator.backward(sum_of(model, x, y), weight=weight)
                optimizer.step()
    except MisuseError as error:
        return str(error)
    finally:
        accelerator.close()
    return ""


def one_rank_without_tokens(world: World) -> list[float]:
    """Train on samples of which those of the last rank have no target."""
    model, optimizer, data = parts()
    accelerator = Accelerator(world=world, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = data[:4]
    if world.is_last:
        y = torch.full_like(y, -100)
    for weight in (int((y >= 0).sum()), (y >= 0).sum()):
        accelerator.backward(sum_of(model, x, y), weight=weight)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.close()
    return flat(model)


def test_a_rank_may_have_nothing_to_count() -> None:
    model, optimizer, data = parts()
    x, y = data[:4]
    for _ in range(2):
        optimizer.zero_grad()
        (sum_of(model, x, y) / (y >= 0).sum()).backward()
        optimizer.step()
    for found in run_ranks(one_rank_without_tokens, 2):
        assert found == pytest.approx(flat(model), abs=1e-12)


def test_a_window_has_weights_or_none() -> None:
    assert "with and without weight" in some_with_and_some_without(World())


def rates(world: World, schedule: str, kind: str, accumulate: int) -> list[float]:
    model, optimizer, data = parts(16)
    scheduler: Any
    if kind == "lambda":
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    elif kind == "cosine":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    else:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)
    accelerator = Accelerator(
        world=world, cpu=True, gradient_accumulation_steps=accumulate, config={"schedule": schedule}
    )
    accelerator.prepare(model, optimizer, scheduler, loader := DataLoader(data, batch_size=2))
    seen = []
    for x, y in loader:
        with accelerator.accumulate():
            accelerator.backward(sum_of(model, x, y) / len(x))
            optimizer.step()
            scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
    accelerator.close()
    return seen


KINDS = ("lambda", "cosine", "cycle")


def all_rates(world: World) -> list[list[list[float]]]:
    ways = (("steps", 1), ("samples", 1), ("steps", 2), ("calls", 2))
    return [[rates(world, schedule, kind, accumulate) for schedule, accumulate in ways] for kind in KINDS]


def test_a_schedule_counts_steps_samples_or_calls() -> None:
    for found in run_ranks(all_rates, 2):
        for kind, (steps, samples, held, calls) in zip(KINDS, found, strict=True):
            alone = rates(World(), "calls", kind, 1)  # one rate after each of the eight steps of one process
            assert steps == pytest.approx(alone[:4])
            assert samples == pytest.approx([alone[1], alone[3], alone[5], alone[7 if kind != "cycle" else 6]])
            assert held[1::2] == pytest.approx(alone[:2])
            assert calls == pytest.approx(alone[:4])
