"""Reading and assigning ``parameter.data`` and ``parameter.grad.data`` in plain cells.

A sharded tensor cannot be given other memory: the values are copied into its part, and what was read from ``data``
before gets a copy of the old values, as code that swaps weights with their averages expects. What a forward pass writes
to a parameter that was gathered for it would be lost, and is refused by the strategy, which counts writes; those to
``data`` do not count in PyTorch.

DDP averages gradients in the memory of its buckets, and a parameter's gradient is the very tensor by which DDP finds
its part of a bucket. If the code assigned other memory to that tensor, DDP would average the bucket and leave the
gradient as it is, in every later step. So the values are copied into the bucket instead.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accel_nb.runtime.distributed import sharded

_STRATEGIES = ("accel_nb.", "deepspeed.", "torch.distributed.")


class GradientData:
    """Replaces ``Tensor.data`` by a property that keeps gradients of ``parameters()`` in their memory."""

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]], is_gathered: Callable[[Tensor], bool]) -> None:
        self._parameters = parameters
        # Returns whether a tensor is the copy of a parameter that a pass computes with, which is not kept.
        self._is_gathered = is_gathered
        # By address of a gradient that is a view of a bucket: its parameter.
        self._owners: dict[int, weakref.ref[nn.Parameter]] = {}
        # By address of a sharded tensor's part: what was read from its `data` and shares that memory.
        self._reads: dict[int, list[weakref.ref[Tensor]]] = {}

    def make_property(self, original: Any) -> property:
        """Return the property to use in place of torch's attribute ``original``."""

        def read(tensor: Tensor) -> Tensor:
            if self._counts_writes(tensor):
                return tensor.detach()
            value = original.__get__(tensor)
            if sharded.is_sharded(tensor) and not _is_called_by_strategy():
                self._record(value)
            return value

        def assign(tensor: Tensor, value: Tensor) -> None:
            if sharded.is_sharded(tensor):
                if _is_called_by_strategy():
                    original.__set__(tensor, value)
                else:
                    self._separate(tensor, value, original)
                    sharded.copy_into(tensor, value)
            elif self._counts_writes(tensor) or (self._is_in_bucket(tensor) and _fits(tensor, value)):
                with torch.no_grad():
                    tensor.copy_(value)
            else:
                original.__set__(tensor, value)

        return property(read, assign)

    def _record(self, value: Tensor) -> None:
        reads = self._reads.setdefault(sharded.local_part(value).data_ptr(), [])
        reads[:] = [known for known in reads if known() is not None]
        reads.append(weakref.ref(value))

    def _separate(self, tensor: Tensor, value: Tensor, original: Any) -> None:
        """Copy what was read from a sharded tensor's ``data`` into memory of its own, unless it is what is assigned."""
        address = sharded.local_part(tensor).data_ptr()
        if sharded.is_sharded(value) and sharded.local_part(value).data_ptr() == address:
            return
        for known in self._reads.pop(address, ()):
            if (read := known()) is not None and (part := sharded.local_part(read)).data_ptr() == address:
                original.__set__(part, part.clone())

    def _counts_writes(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and self._is_gathered(tensor)

    def _is_in_bucket(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the gradient of a parameter, and a view of larger memory."""
        if tensor.requires_grad or is_lazy(tensor) or not tensor._is_view():
            return False
        address = tensor.data_ptr()
        if address not in self._owners:
            owners = [value for value in self._parameters() if value.grad is not None and value.grad._is_view()]
            self._owners = {value.grad.data_ptr(): weakref.ref(value) for value in owners if value.grad is not None}
        reference = self._owners.get(address)
        owner = None if reference is None else reference()
        return owner is not None and owner.grad is tensor  # and no view of the gradient


def _is_called_by_strategy() -> bool:
    """Return whether a strategy makes the assignment, which gathers and divides parameters itself."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(_STRATEGIES)


def _fits(tensor: Tensor, value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and (value.shape, value.dtype, value.device) == (tensor.shape, tensor.dtype, tensor.device)
        and value.layout is torch.strided
    )
