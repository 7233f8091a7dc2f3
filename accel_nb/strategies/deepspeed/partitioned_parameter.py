"""Parameters of ZeRO stage 3, which are gathered only inside of a model's forward and backward passes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.errors import MisuseError

# The code that gathers and shards parameters, or is called by it.
_INNER = ("accel_nb.", "deepspeed.", "torch.")
_CALLED_BY_USERS = "torch.nn.utils."
# In a plain cell the code's reads of `data` come through a property, and its calls of factories through functions.
_PROPERTY = "accel_nb.accelerator.plain_cells.replacements.gradient_data"
_FACTORIES = "accel_nb.accelerator.plain_cells.replacements.device_moves"
_PASSES_ON = ("torch._tensor", "torch.overrides", "torch.functional", "torch.nn.functional", _PROPERTY, _FACTORIES)
# Plain cells replace attributes of Tensor, and not those that it inherits.
_BASE: Any = Tensor.__base__
_SHAPES: dict[Any, Callable[[tuple[int, ...]], Any]] = {
    _BASE.shape.__get__: torch.Size,
    Tensor.size: torch.Size,
    Tensor.numel: math.prod,
    torch.numel: math.prod,
    Tensor.nelement: math.prod,
    Tensor.dim: len,
    Tensor.ndimension: len,
    _BASE.ndim.__get__: len,
    Tensor.__len__: lambda shape: shape[0],
}
_NAMES = ("requires_grad", "grad", "grad_fn", "is_leaf", "dtype", "device", "layout", "is_cuda", "is_sparse", "is_meta")
_WITHOUT_VALUES = {
    *(getattr(_BASE, name).__get__ for name in _NAMES),
    *(getattr(_BASE, name).__set__ for name in ("requires_grad", "grad")),
    Tensor.__hash__, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.requires_grad_,
    Tensor.register_hook, Tensor.__repr__, Tensor.__format__,
    Tensor.new_tensor, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full,
}  # fmt: skip
_LIKE = {f"{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")}
"""Names of functions that make a tensor of a parameter's shape; names, since plain cells replace the functions."""


@dataclass
class Passes:
    """The number of running forward and backward passes of a model."""

    number: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a pass in the block."""
        self.number += 1
        try:
            yield
        finally:
            self.number -= 1


def mark_partitioned(parameters: Iterable[Any], passes: Passes) -> None:
    """Make computations with parameters raise outside of ``passes``; `unmark_partitioned` undoes it."""
    for value in parameters:
        if type(value) is nn.Parameter:
            value.__class__ = PartitionedParameter
            vars(value)["_accel_nb_passes"] = passes


def unmark_partitioned(parameters: Iterable[Any]) -> None:
    """Make parameters plain ones again."""
    for value in parameters:
        if type(value) is PartitionedParameter:
            setattr(value, "__class__", nn.Parameter)  # noqa: B010


class PartitionedParameter(nn.Parameter):
    """A parameter with which computations raise outside of passes; it has the shape of the full parameter.

    Its data is empty there. If DeepSpeed keeps it whole, it can be read; writes raise, since they would have no effect.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value = next(
            (
                item
                for item in _items(args, kwargs)
                if isinstance(item, PartitionedParameter) and not _is_usable(item, func)
            ),
            None,
        )
        if value is not None and func not in _WITHOUT_VALUES and not is_called_inside(sys._getframe(1)):
            shape: Any = value
            if func.__name__ in _LIKE:
                like = torch.empty(tuple(shape.ds_shape), dtype=value.dtype, device="meta")
                named = {name: item for name, item in (kwargs or {}).items() if item is not value}
                return func(like, *args[1:], **{"device": value.device, **named})
            found = _SHAPES.get(func)
            if found is None:
                raise MisuseError(_EMPTY)
            whole = found(tuple(shape.ds_shape))
            dims = (*args[1:], *(item for name, item in (kwargs or {}).items() if name == "dim"))
            return whole if func is not Tensor.size or dims in ((), (None,)) else whole[dims[0]]
        return super().__torch_function__(func, types, args, kwargs or {})


def _items(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Iterator[Any]:
    """Yield the arguments of a function, and the items of those that are lists, as of `torch.cat`."""
    for item in (*args, *(kwargs or {}).values()):
        if isinstance(item, list | tuple):
            yield from item
        else:
            yield item


def _is_usable(value: Any, func: Any) -> bool:
    names = vars(value)
    if "ds_status" not in names:
        return True
    if names["ds_status"].name != "AVAILABLE":
        return False
    if names["_accel_nb_passes"].number or names["ds_active_sub_modules"]:
        return True
    return not (names["ds_persist"] and _may_write(func))


def _may_write(func: Any) -> bool:
    # A plain cell replaces the attribute, by whose getter torch calls.
    if getattr(func, "__self__", None) is Tensor.data:
        return True
    name = func.__name__
    return name.endswith("_") and not name.endswith("__")


def is_called_inside(frame: FrameType | None) -> bool:
    """Return whether the caller is code of this package, DeepSpeed or torch, and not user code."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in _PASSES_ON:
            return name.startswith(_INNER) and not name.startswith(_CALLED_BY_USERS)
        frame = frame.f_back
    return False


_EMPTY = (
    "the code computes with a parameter outside of the model's forward pass, where ZeRO stage 3 has shards of it: "
    "train with --zero-stage 2, or with --strategy fsdp, whose parameters can be computed with"
)
