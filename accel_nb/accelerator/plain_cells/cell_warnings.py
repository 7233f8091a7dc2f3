"""What a plain cell is told while it runs: where it is not divided among the workers, or cannot equal one device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.plain_cells.object_graph import frame_of_user, is_called_by_user
from accel_nb.accelerator.prepare.preparer import is_prepared
from accel_nb.accelerator.process.memory_release import is_out_of_memory
from accel_nb.data.order import Share
from accel_nb.errors import AccelNbError, NanLossError
from accel_nb.runtime.world import World

WAYS_OUT = (
    "`--batch per-worker` gives each worker a whole batch, one worker (`--strategy single --cpus 1`, or `--gpus 1`) "
    "computes what one device does"
)
_SHAPE_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


def remark_on(error: BaseException, share: Share | None) -> str | None:
    """Return what an error may have to do with a batch that was divided; None if no batch was, or it cannot be.

    ``share`` is what this rank had of the batch when the error was raised.
    """
    if share is None or share.num_samples >= share.total_samples:
        return None
    if not isinstance(error, _SHAPE_ERRORS) or is_out_of_memory(error):
        return None
    if isinstance(error, AccelNbError) and not isinstance(error, NanLossError):
        return None
    return (
        f"the batch was divided: this worker had {share.num_samples} of its {share.total_samples} samples. Code that "
        "needs the whole batch, such as a hidden state of its size, a mean over selected samples or batch "
        f"normalisation of two, fails on a share: {WAYS_OUT}; drop_last=True leaves no short batch"
    )


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


def warn_of_unproven_loss(accelerator: Accelerator, problem: str) -> None:
    """Warn that a loss may not be a sum or a mean over samples; ``problem`` says what stands in the way."""
    _warn(
        accelerator,
        f"this loss is not proven to be a sum or a mean over samples ({problem}): each worker computes it from its own "
        f"share of the batch, which may differ from one device. {WAYS_OUT}",
    )


def warn_of_random_numbers(accelerator: Accelerator) -> None:
    """Warn that random numbers are drawn for the samples of a share."""
    _warn(
        accelerator,
        "random numbers are drawn for each batch (noise, augmentation, sampling): each worker draws its own, so the "
        "result is not equal to that of one device, but one that another seed could give",
    )


def warn_of_buffers(accelerator: Accelerator) -> None:
    """Warn that a forward pass changes buffers by what it sees of a batch."""
    _warn(
        accelerator,
        "the model changes buffers in its forward pass (running statistics, codebooks): those of the first worker "
        f"count, which have seen its share of each batch, and may differ from one device. {WAYS_OUT}",
    )


def warn_of_unequal_shares(accelerator: Accelerator) -> None:
    """Warn that a step used batches of several loaders that were not divided in the same proportion."""
    _warn(
        accelerator,
        "a step used batches of several loaders whose shares were uneven in different ways, as those of short last "
        "batches are, and a loss has one weight for all of them: it may differ from one device. drop_last=True, or "
        f"batch sizes that the number of workers divides, avoid that; {WAYS_OUT}",
    )


def warn_of_gradient_hooks(accelerator: Accelerator) -> None:
    """Warn that hooks see gradients of a share."""
    _warn(
        accelerator,
        "hooks on gradients run on each worker before the workers' gradients are averaged: what they change or read is "
        f"of one share of the batch, which may differ from one device. {WAYS_OUT}",
    )


def warn_of_evaluation_mode(accelerator: Accelerator) -> None:
    """Warn that a loop trains a model in evaluation mode, and that its first epoch was not divided."""
    _warn(
        accelerator,
        "this loop trains while the model is in evaluation mode, so every worker reads this epoch whole: the result is "
        "that of one device, but no faster. Its next epochs are divided; model.train() before the loop divides this "
        "one too",
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
    """Warn on the main rank of several, at the user's own line, also where the notebook ignores warnings."""
    if not (accelerator.is_main_process and accelerator.num_processes > 1):
        return
    frame = frame_of_user()
    place = ("<cell>", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.warn_explicit(words, UserWarning, *place)
