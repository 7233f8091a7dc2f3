"""Detection of writes to tensors by the code of a forward pass, such as to a codebook that the inputs update."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_nb.runtime.tensors.versions import version_of

_KINDS = (Tensor, nn.Parameter)
_STATISTICS = ("running_mean", "running_var")
"""Arguments to which batch normalization writes, of which the schemas of torch's kernels do not say so."""


class TensorWrites(TorchDispatchMode):
    """Copies each of some named tensors before an operation writes to its memory, while the mode is on."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._by_memory: dict[int, list[tuple[str, Tensor]]] = {}
        for name, value in tensors:
            if type(value) in _KINDS and value.layout is torch.strided and not value.is_meta:
                self._by_memory.setdefault(value.untyped_storage().data_ptr(), []).append((name, value))
        self._before: dict[str, tuple[Tensor, Tensor, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, name in _written_arguments(func):
            value = args[number] if number < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                self._keep(tensor)
        return func(*args, **kwargs)

    def _keep(self, tensor: Any) -> None:
        if type(tensor) not in _KINDS or tensor.layout is not torch.strided:
            return
        for name, value in self._by_memory.get(tensor.untyped_storage().data_ptr(), ()):
            if name not in self._before:
                self._before[name] = value, value.detach().clone(), version_of(value)

    def unchanged(self) -> list[str]:
        """Return the names of the tensors that were written and have the same values as before.

        A broadcast of buffers by DistributedDataParallel does not count: it leaves their versions as they are.
        """
        return [
            name
            for name, (value, before, version) in self._before.items()
            if version_of(value) != version and torch.equal(value, before)
        ]

    @torch.no_grad()
    def restore(self) -> dict[str, Tensor]:
        """Restore the tensors that were written; return the changed values, by name."""
        changed: dict[str, Tensor] = {}
        for name, (value, before, _) in self._before.items():
            if not torch.equal(value, before):
                changed[f"tensor {name}"] = value.detach().clone()
                value.data.copy_(before)
        return changed


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operation may write to."""
    return tuple(
        (number, argument.name)
        for number, argument in enumerate(func._schema.arguments)
        if argument.name in _STATISTICS or (argument.alias_info is not None and argument.alias_info.is_write)
    )
