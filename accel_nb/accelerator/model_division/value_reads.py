"""Observation of tensor values that a model's code reads as Python values, and of shapes that depend on values.

Each rank reads them from its own rows. So a branch that is the same for all rows when the layout is checked may later
differ between ranks, or between the rows and the whole batch.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel_nb.runtime.tensors.nested import find_tensors
from accel_nb.runtime.tensors.own_reads import is_own_read

_READERS = ("tolist", "numpy")
"""Methods that read values without an operation that a dispatch mode can observe."""
_SHAPED_BY_VALUES = ("_pack_padded_sequence",)
"""Operations whose output has a shape that depends on values, although torch does not tag them so."""


@contextmanager
def observed_reads(observe: Callable[[Any], object]) -> Iterator[None]:
    """Call ``observe`` with each value that this thread reads in the block, except by ``observe`` and accel_nb itself.

    Values are the results of ``item()``, ``tolist()`` and conditions, and shapes such as the shape of ``nonzero()``.
    """
    is_inside, thread = False, threading.get_ident()

    def observe_outside(value: Any) -> None:
        nonlocal is_inside
        if not (is_inside or is_own_read() or threading.get_ident() != thread):
            is_inside = True
            try:
                observe(value)
            finally:
                is_inside = False

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            value = original(tensor, *args, **kwargs)
            observe_outside(zlib.crc32(value.tobytes()) if isinstance(value, numpy.ndarray) else value)
            return value

        return read

    own = {name: vars(Tensor)[name] for name in _READERS if name in vars(Tensor)}
    try:
        for name in _READERS:
            setattr(Tensor, name, wrap(getattr(Tensor, name)))
        with _ReadOperations(observe_outside):
            yield
    finally:
        for name in _READERS:
            if name in own:
                setattr(Tensor, name, own[name])
            elif name in vars(Tensor):  # else inherited from Tensor's C base
                delattr(Tensor, name)


class _ReadOperations(TorchDispatchMode):
    def __init__(self, observe: Callable[[Any], None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, bool | int | float | complex):
            self._observe(result)
        elif is_shaped_by_values(func, args):
            self._observe([tuple(tensor.shape) for tensor in find_tensors(result)])
        return result


def is_shaped_by_values(func: Any, args: Any) -> bool:
    """Return whether the shape of an operation's result depends on values of its arguments."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return func.overloadpacket.__name__ in _SHAPED_BY_VALUES
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def values_to_compare(*runs: list[Any]) -> tuple[Any, ...]:
    """Return the read values of several runs: each value that was the same in all of them, `ANY_VALUE` for the others.

    Where values differed although the results were equal, the value does not affect the result.
    """
    return tuple(
        values[0] if all(value == values[0] for value in values) else ANY_VALUE for values in zip(*runs, strict=False)
    )


class _AnyValue:
    def __repr__(self) -> str:
        return "ANY_VALUE"


ANY_VALUE = _AnyValue()
"""Represents a read value that does not affect the result."""
