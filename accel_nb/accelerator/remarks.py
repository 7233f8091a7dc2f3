"""What a plain cell is told while it runs: where it is not divided among the workers, or cannot equal one device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.prepare import is_prepared
from accel_nb.accelerator.reach import is_called_by_user
from accel_nb.runtime.world import World


def remark_on(error: BaseException) -> str | None:
    """Return what an error means that dividing a batch may have caused, or None."""
    if isinstance(error, ValueError) and str(error).startswith("Expected more than 1 value per channel"):
        return (
            "this worker's share of the batch is one sample, and batch normalisation needs two: drop_last=True, or "
            "another batch size, leaves no share of one"
        )
    return None


@contextmanager
def telling_of_unprepared(world: World) -> Iterator[None]:
    """While the block runs on many ranks, warn if the first optimizer that the user's code steps is not prepared."""
    has_stepped = world.size == 1 or not world.is_main

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal has_stepped
        if has_stepped or not is_called_by_user():
            return
        has_stepped = True
        if not is_prepared(optimizer):
            warnings.warn(
                f"this cell mentions `accelerator`, so it runs as written, and its {type(optimizer).__name__} is not "
                "prepared: every worker trains alone, with all of the data. Call accelerator.prepare(model, optimizer, "
                "loader), or leave `accelerator` out of the cell",
                stacklevel=4,
            )

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def warn_of_lonely(accelerator: Accelerator) -> None:
    """Warn that an optimizer steps what no prepared model holds."""
    _warn(
        accelerator,
        "an optimizer was made whose model the cell's preparation does not see: every worker trains it alone, with "
        "all of the data. Bind the model to a name of the cell, or of the function that trains it",
    )


def warn_of_loose(accelerator: Accelerator, names: Sequence[str]) -> None:
    """Warn that tensors in no module are trained."""
    _warn(
        accelerator,
        f"{', '.join(names)}: these tensors require gradients and belong to no module, so every worker reads the "
        "loader whole and trains them with all of the data: the result is that of one device, but no faster. Make "
        "them parameters of a module to divide the work",
    )


def warn_of_comparing(accelerator: Accelerator, rows: int) -> None:
    """Warn that a loss compares samples of one share only."""
    _warn(
        accelerator,
        f"this loss compares the samples of a batch with each other ({rows} x {rows}): each worker compares those "
        "of its own share only, which is not what one device would compute. `--batch per-worker` gives each worker "
        "a whole batch to compare; torch.distributed.nn.all_gather brings the others' samples, with gradients",
    )


def warn_of_whole(accelerator: Accelerator) -> None:
    """Warn that a loader that trains is not divided."""
    _warn(
        accelerator,
        "every worker read the loader whole, since the code that iterates it does not lead to a backward pass that "
        "can be seen: the result is that of one device, but no faster. Iterate the loader in the function, or the "
        "top-level statement, that calls loss.backward()",
    )


def _warn(accelerator: Accelerator, words: str) -> None:
    if accelerator.is_main_process and accelerator.num_processes > 1:
        warnings.warn(words, stacklevel=5)
