"""Training on ranks of a mesh, and what its copies have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor  # imported once, before ranks are forked
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.runtime.distributed.sharded import is_sharded, local_shard, own_region
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.mesh_models import gpt, loss_of, optimizers, tokens

CLOSE = 1e-9


def batches(sizes: tuple[int, ...]) -> DataLoader[Any]:
    """Return a loader of the batches of `by_hand`; only the last one may be short."""
    x, y = (
        torch.cat(parts) for parts in zip(*(tokens(number, size) for number, size in enumerate(sizes)), strict=True)
    )
    return DataLoader(TensorDataset(x, y), batch_size=sizes[0])


def train(
    accelerator: Accelerator, model: Any, made: list[Any], loader: Any, clip: float | None = None, loss: Any = loss_of
) -> None:
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, x, y))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()


def assert_equal_copies(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise unless all ranks that hold the same part of a parameter hold the same bits."""
    for name, value in model.named_parameters():
        region = own_region(value) if is_sharded(value) else None
        found = accelerator.gather_object([(str(region), local_shard(value).detach().numpy().tobytes().hex())])
        assert len(dict(found)) == len(set(found)), name


def range_of(accelerator: Accelerator, first: int, last: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's shares of batches of eight samples."""
    share = accelerator.components.data_world
    found = (tokens(number) for number in range(first, last))
    return [(x[share.rank :: share.size], y[share.rank :: share.size]) for x, y in found]


def train_cases(world: World, train_case: Callable[..., Tensor], cases: list[Any]) -> list[Tensor]:
    """Return the weights after each case."""
    return [train_case(world, *case) for case in cases]


def assert_weights(train_case: Callable[..., Tensor], size: int, cases: list[Any], expected: list[Tensor]) -> None:
    """Run cases on ``size`` ranks; raise unless every rank ends with the expected weights."""
    for rank, found in enumerate(run_ranks(train_cases, size, train_case, cases, timeout_s=120)):
        for case, weights, wanted in zip(cases, found, expected, strict=True):
            assert (weights - wanted).abs().max() < CLOSE, (size, case, rank)


def train_with_dropout(accelerator: Accelerator) -> list[str]:
    """Train with dropout, which leaves copies equal to the bit; return the state of each rank's generator."""
    model = gpt(dropout=0.3)
    made = optimizers(model, "adamw")
    loader = batches((8,) * 8)
    accelerator.prepare(model, loader, *made)
    train(accelerator, model, made, loader)
    assert_equal_copies(accelerator, model)
    states = accelerator.gather_object([torch.get_rng_state().numpy().tobytes().hex()])
    accelerator.close()
    return states
