"""Random numbers for some rows of a batch: a rank draws numbers for the whole batch, and uses those of its own rows.

So a model that computes some rows has the same dropout as on one device, and the generators of all ranks stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel_nb.runtime.tensors.nested import find_tensors

_FUSED = ("_scaled_dot_product", "_efficient_attention", "_flash_attention", "_cudnn_rnn", "_thnn", "miopen_rnn")
"""Prefixes of the names of operations that draw random numbers inside of a fused kernel."""


class Draw(NamedTuple):
    """The dim of the rows in one draw of random numbers; None: all rows use the same numbers."""

    name: str
    """The operation."""
    num_dims: int
    dim: int | None


class DrawDims(Protocol):
    """Finds the dims of the rows in tensors of random numbers."""

    def find(self, name: str, shape: Sequence[int]) -> int | None:
        """Return the dim of the rows; called once for each draw, in order."""
        ...


class DrawnShapes:
    """Records the shapes of the draws of a call with all rows."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def find(self, name: str, shape: Sequence[int]) -> int | None:
        """Record a shape; the numbers are drawn for all rows anyway."""
        self.shapes.append(tuple(shape))
        return None


class ComparedShapes:
    """Finds the dim of the rows in each draw: its size differs from that in the call with all rows.

    Attributes:
        problem: why the draws of the two calls do not correspond; None if they do.
    """

    def __init__(self, whole: DrawnShapes) -> None:
        self._shapes = iter(whole.shapes)
        self.draws: list[Draw] = []
        self.problem: str | None = None

    def find(self, name: str, shape: Sequence[int]) -> int | None:
        """Return the only dim whose size differs; None if no size differs, or if this draw has no counterpart."""
        whole = next(self._shapes, None)
        changed = [dim for dim, (one, other) in enumerate(zip(shape, whole or (), strict=False)) if one != other]
        if whole is None or len(whole) != len(shape) or len(changed) > 1:
            self.problem = f"`{name}` draws numbers of shape {tuple(shape)}, in which the rows are not found"
            return None
        self.draws.append(Draw(name, len(shape), changed[0] if changed else None))
        return self.draws[-1].dim


class RecordedDims:
    """The dims of the rows in the draws of a call, in order, as a check has found them.

    A call may draw more often than the check, as once for each token. Then a draw has the dim of the last one by the
    same operation with as many dims.
    """

    def __init__(self, draws: Sequence[Draw]) -> None:
        self._draws = draws
        self._number = 0
        self._by_kind = {(draw.name, draw.num_dims): draw.dim for draw in draws}

    def find(self, name: str, shape: Sequence[int]) -> int | None:
        """Return the dim of the rows in the next draw."""
        number, kind = self._number, (name, len(shape))
        self._number += 1
        if number < len(self._draws) and self._draws[number][:2] == kind:
            return self._draws[number].dim
        return self._by_kind.get(kind)


class RowRandom(TorchDispatchMode):
    """Draws random numbers for ``total`` rows, and uses those of ``size`` rows from ``start`` on.

    Attributes:
        has_drawn: whether random numbers were drawn.
        problem: why they could not be assigned to rows; None if they could.
    """

    def __init__(self, start: int, size: int, total: int, dims: DrawDims) -> None:
        super().__init__()
        self._start, self._size, self._total, self._dims = start, size, total, dims
        self.has_drawn = False
        self.problem: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operation; if it draws random numbers, draw them for the rows of the whole batch."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        self.has_drawn = True
        name = func.overloadpacket.__name__
        if name.startswith(_FUSED):
            self.problem = f"`{name}` draws inside of a kernel"
            return func(*args, **kwargs)
        if name == "native_dropout":
            return self._dropout(func, *args, **kwargs)
        own = next((value for value in args if isinstance(value, Tensor)), None)
        if own is None:
            return self._from_sizes(func, args, kwargs)
        dim = self._dims.find(name, own.shape)
        if dim is None:
            return func(*args, **kwargs)
        if any(isinstance(value, Tensor) and value is not own for value in find_tensors([*args[1:], *kwargs.values()])):
            self.problem = self.problem or f"`{name}` draws with parameters in tensors"
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            whole = func(self._new_whole(own, dim), *args[1:], **kwargs)
            return own.copy_(self._select_own(whole, own.shape, dim))
        if name.startswith("bernoulli") and len(args) == 1:  # the probabilities are the values themselves
            padded = self._new_whole(own, dim).zero_()
            self._select_own(padded, own.shape, dim).copy_(own)
            return self._select_own(func(padded, **kwargs), own.shape, dim).clone()
        if name.startswith(("rand", "bernoulli")):
            whole = func(self._new_whole(own, dim), *args[1:], **kwargs)
            return self._select_own(whole, own.shape, dim).clone()
        self.problem = self.problem or f"`{name}` draws in a way that is not divided"
        return func(*args, **kwargs)

    def _dropout(self, func: Any, source: Tensor, p: float, train: bool | None = True) -> Any:
        dim = self._dims.find("native_dropout", source.shape)
        if dim is None:
            return func(source, p, train)
        _, mask = func(self._new_whole(source, dim).fill_(1), p, train)
        mask = self._select_own(mask, source.shape, dim).clone()
        return source * mask * (0.0 if p == 1 else 1 / (1 - p)), mask

    def _from_sizes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a factory function, such as ``rand``, whose sizes are a list among its arguments."""
        number = next((index for index, value in enumerate(args) if isinstance(value, list | tuple)), None)
        dim = None if number is None else self._dims.find(func.overloadpacket.__name__, args[number])
        if number is None or dim is None:
            return func(*args, **kwargs)
        shape = list(args[number])
        whole = func(*args[:number], self._whole_shape(shape, dim), *args[number + 1 :], **kwargs)
        return self._select_own(whole, shape, dim).clone()

    def _whole_shape(self, shape: Sequence[int], dim: int) -> list[int]:
        return [*shape[:dim], shape[dim] // self._size * self._total, *shape[dim + 1 :]]

    def _new_whole(self, own: Tensor, dim: int) -> Tensor:
        """Return an empty tensor for all rows, with the same order of dims in memory, in which numbers are drawn."""
        order = sorted(range(own.dim()), key=lambda number: (-own.stride(number), number))
        shape = self._whole_shape(own.shape, dim)
        whole = own.new_empty([shape[number] for number in order])
        return whole.permute([order.index(number) for number in range(own.dim())])

    def _select_own(self, whole: Tensor, shape: Sequence[int], dim: int) -> Tensor:
        return whole.narrow(dim, shape[dim] // self._size * self._start, shape[dim])


def _draws_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers: dropout in evaluation mode, and attention without dropout, do not."""
    arguments = func._schema.arguments
    passed = dict(zip([argument.name for argument in arguments], args, strict=False)) | dict(kwargs)
    bound = {argument.name: argument.default_value for argument in arguments} | passed  # defaults are not passed
    if "dropout_p" in bound:
        return bool(bound["dropout_p"])
    if "dropout" in bound and "train" in bound:
        return bool(bound["dropout"]) and bool(bound["train"])
    return bound.get("train") is not False and bound.get("training") is not False
