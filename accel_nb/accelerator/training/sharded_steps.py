"""Optimizers that PyTorch cannot compute on sharded parameters, which are refused by name."""

from __future__ import annotations

from torch.optim import Optimizer

from accel_nb.errors import MisuseError
from accel_nb.runtime.torch_private import torch_version


def refuse_wrong_optimizer(optimizer: Optimizer) -> None:
    """Raise `MisuseError` for an optimizer that the installed PyTorch computes wrongly on shards, without an error.

    PyTorch 2.9 computes a norm of a sharded tensor from wrong powers of the norms of its shards.
    """
    if type(optimizer).__name__ == "Adafactor" and torch_version() == "2.9":
        raise _wrong_on_shards(optimizer, "norms of shards are wrong in PyTorch 2.9")


def refuse_failed_optimizer(optimizer: Optimizer, error: RuntimeError) -> None:
    """Raise `MisuseError` if an optimizer's step has failed because PyTorch cannot compute it on shards."""
    message = str(error)
    if any(word in message for word in ("placement", "DTensor", "sharding strategy")):
        raise _wrong_on_shards(optimizer, message.splitlines()[0]) from error


def _wrong_on_shards(optimizer: Optimizer, why: str) -> MisuseError:
    return MisuseError(
        f"{type(optimizer).__name__} cannot step weights of which each rank holds a shard: PyTorch does not compute it "
        f"on sharded tensors ({why}). Train with --strategy ddp, or with an optimizer that steps each value alone, "
        "such as AdamW"
    )
