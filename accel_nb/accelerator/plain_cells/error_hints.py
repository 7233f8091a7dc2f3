"""Hints for errors of a cell that the division of a batch or of weights may have caused."""

from __future__ import annotations

import traceback

from accel_nb.accelerator.plain_cells.cell_warnings import ALTERNATIVES
from accel_nb.accelerator.process.memory_release import is_out_of_memory
from accel_nb.data.order import BatchShare
from accel_nb.errors import AccelNbError, NanLossError, error_text
from accel_nb.runtime.distributed.sharded import is_sharded

_SHAPE_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
_TENSOR_ERRORS = (RuntimeError, TypeError, AttributeError)
_PART = "DTensor"
"""PyTorch's name for a sharded tensor in messages; in a backward pass no frame has the tensor itself."""


def explain_error(error: BaseException, share: BatchShare | None) -> str | None:
    """Return a hint for an error, if the division of a batch or of weights may be the cause; else None.

    ``share`` is this rank's share of the batch when the error was raised.
    """
    return None if is_out_of_memory(error) else _explain_batch(error, share) or _explain_weights(error)


def _explain_batch(error: BaseException, share: BatchShare | None) -> str | None:
    if share is None or share.is_whole or share.num_samples >= share.total_samples:
        return None
    is_other = isinstance(error, AccelNbError) and not isinstance(error, NanLossError)
    if is_other or not isinstance(error, _SHAPE_ERRORS):
        return None
    return (
        f"the batch was divided: this worker had {share.num_samples} of its {share.total_samples} samples. Code that "
        "needs the whole batch, such as a hidden state of its size, a mean over selected samples or batch "
        f"normalization of two, fails on a share: {ALTERNATIVES}; drop_last=True leaves no short batch"
    )


def _explain_weights(error: BaseException) -> str | None:
    if isinstance(error, AccelNbError) or not isinstance(error, _TENSOR_ERRORS):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The cell's own frame has all names of the notebook.
    values = [value for frame in frames if frame.f_locals is not frame.f_globals for value in frame.f_locals.values()]
    has_parts = any(is_sharded(value) for value in (getattr(error, "obj", None), *values))
    if not (has_parts or _PART in error_text(error)):
        return None
    return (
        "the weights are divided among the workers: this code had a tensor of which each worker has a part, and not "
        "all that PyTorch does with whole tensors works with these. `--strategy ddp` leaves the weights whole"
    )
