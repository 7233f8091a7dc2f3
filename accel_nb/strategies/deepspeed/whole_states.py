"""Full values in state dicts of models and optimizers whose tensors are sharded.

On one device the values share memory with the tensors: writes change the model or the optimizer, and later steps change
the values. Here they are copies.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.process.user_code import warn_at_user_line


class WholeStates:
    """The values of state dicts that code has read on one rank; every rank must read the same ones."""

    def __init__(self) -> None:
        # Sharded tensors, their values, and the values' versions. Code may write into one that it does not keep.
        self._read: list[tuple[Tensor, Tensor, int]] = []
        # The values, and their versions, that were read before the last pass or step, if code keeps references.
        self._earlier: list[tuple[weakref.ref[Tensor], int]] = []
        self._has_warned = False

    def add(self, sharded_tensor: Tensor, whole: Tensor) -> None:
        """Record the full value of a sharded tensor in a state dict."""
        self._read.append((sharded_tensor, whole, whole._version))

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy changes that code has made to the values into this rank's shards.

        Raises `MisuseError` if code has written into one that it read before the last pass or step.
        """
        for sharded_tensor, whole, version in self._read:
            if whole._version != version:
                sharded.copy_into(sharded_tensor, whole)
            self._earlier.append((weakref.ref(whole), whole._version))
        self._read.clear()
        kept = [(held, version) for reference, version in self._earlier if (held := reference()) is not None]
        self._earlier = [(weakref.ref(held), version) for held, version in kept]
        if any(held._version != version for held, version in kept):
            self._earlier.clear()
            raise MisuseError(_WRITTEN_LATE)

    def warn_of_step(self) -> None:
        """Warn, once, if code keeps values from before a step, as the step does not change them."""
        if not self._has_warned and any(reference() is not None for reference, _ in self._earlier):
            self._has_warned = True
            warn_at_user_line(_KEPT)


_WRITTEN_LATE = (
    "a value of a state dict is written to that was read before the last forward pass or step: DeepSpeed has shards of "
    "the tensors, and the value is a copy. Read the state dict where it is changed, or train with --strategy ddp, "
    "whose values are the tensors themselves"
)
_KEPT = (
    "values of a state dict are kept over a step: DeepSpeed has shards of the state of optimizers, and ZeRO stage 3 of "
    "weights, so they are copies, which do not show later steps. On one device they do. Read the state dict again "
    "where the later values are meant, or copy it by copy.deepcopy where the present ones are"
)
