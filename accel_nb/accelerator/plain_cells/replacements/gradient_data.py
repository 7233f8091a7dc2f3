"""Reading and assigning ``parameter.data`` and ``parameter.grad.data`` in plain cells.

A sharded tensor cannot be given other memory: assigned values are copied into this rank's shard, and tensors that were
read from ``data`` before get copies of the old values, as code that swaps weights with their averages expects. An
unsharded tensor that was assigned is kept equal to the shard while code holds it, as is one that has received the
``data`` of a sharded tensor. Writes of a forward pass to a parameter that was gathered for it would be lost: the
strategy detects them by version counters and raises; PyTorch does not count writes to ``data``.

DDP averages gradients in the memory of its buckets, and a parameter's gradient is the tensor by which DDP finds
its place in a bucket. If the code assigned other memory to that tensor, DDP would average the bucket and leave the
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
        # Returns whether a tensor is a gathered copy of a parameter, which is freed after the pass.
        self._is_gathered = is_gathered
        # By address of a gradient that is a view of a bucket: its parameter.
        self._owners: dict[int, weakref.ref[nn.Parameter]] = {}

    def make_property(self, original: Any) -> property:
        """Return the property to use in place of torch's attribute ``original``."""

        def read(tensor: Tensor) -> Tensor:
            if self._counts_writes(tensor):
                return tensor.detach()
            value = original.__get__(tensor)
            if sharded.is_sharded(tensor) and not _is_called_by_strategy() and (copies := sharded.copies()) is not None:
                copies.record_alias(tensor)
                copies.record_alias(value)
            return value

        def assign(tensor: Tensor, value: Tensor) -> None:
            if sharded.is_sharded(tensor):
                if _is_called_by_strategy():
                    original.__set__(tensor, value)
                else:
                    self._separate(tensor, value, original.__set__)
                    sharded.copy_into(tensor, value)
                    self._share_memory(tensor, value, original.__set__)
            elif sharded.is_sharded(value) and (copies := sharded.copies()) is not None:
                original.__set__(tensor, copies.gather(value))
            elif (self._counts_writes(tensor) and not _is_called_by_strategy()) or self._keeps_memory(tensor, value):
                with torch.no_grad():
                    tensor.copy_(value)
            else:
                original.__set__(tensor, value)

        return property(read, assign)

    def _separate(self, tensor: Tensor, value: Tensor, set_data: Any) -> None:
        """Copy the values of tensors that share memory with a sharded tensor, unless they are the assigned ones."""
        address = sharded.local_shard(tensor).data_ptr()
        is_assigned = sharded.is_sharded(value) and sharded.local_shard(value).data_ptr() == address
        if not is_assigned and (copies := sharded.copies()) is not None:
            copies.separate(tensor, set_data)

    def _share_memory(self, tensor: Tensor, value: Tensor, set_data: Any) -> None:
        """Keep an assigned tensor equal to the sharded tensor: on one device both have the same memory."""
        copies = sharded.copies()
        if copies is None:
            return
        copies.writes += 1
        if (value.dtype, value.device, value.shape) != (tensor.dtype, tensor.device, tensor.shape):
            return
        if not sharded.is_sharded(value):
            copies.add(tensor, value.detach(), by_value=True)
        elif sharded.local_shard(value).data_ptr() in self._addresses_of_shards() - {
            sharded.local_shard(tensor).data_ptr()
        }:
            copies.record_pair(tensor, value)
        else:
            copies.join(tensor, value, set_data)

    def _addresses_of_shards(self) -> set[int]:
        parts = (sharded.local_shard(value) for value in self._parameters() if sharded.is_sharded(value))
        return {part.data_ptr() for part in parts if part.numel()}

    def _counts_writes(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and self._is_gathered(tensor)

    def _keeps_memory(self, tensor: Tensor, value: Any) -> bool:
        return self._is_in_bucket(tensor) and _fits(tensor, value)

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
