"""Detection of code that reads random numbers as Python values, and so may branch differently in each call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel_nb.accelerator.model_division.value_reads import is_shaped_by_values
from accel_nb.runtime.distributed.sharded import is_sharded
from accel_nb.runtime.tensors.nested import find_tensors


class RandomReads(TorchDispatchMode):
    """Records whether code reads values that were computed from numbers drawn in the block.

    Attributes:
        has_read: whether code has read such a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_read = False
        # By the address of its memory: a tensor that depends on drawn numbers. Holding it keeps the address in use.
        self._drawn: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        depends = any(_address(tensor) in self._drawn for tensor in find_tensors([args, kwargs]))
        result = func(*args, **kwargs)
        if depends and (isinstance(result, bool | int | float | complex) or is_shaped_by_values(func, args)):
            self.has_read = True
        if depends or torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in find_tensors([result]):
                if address := _address(tensor):
                    self._drawn[address] = tensor.detach()
        return result


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 for a sharded tensor, or one that is not strided."""
    has_memory = tensor.layout is torch.strided and not is_sharded(tensor)
    return tensor.untyped_storage().data_ptr() if has_memory else 0
