"""Random numbers for some rows of a batch: a rank draws them for the whole batch, and uses those of its own rows.

So a model that computes some rows has the same dropout as on one device, and the generators of all ranks stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel_nb.runtime.tensors.nested import find_tensors

_FUSED = ("_scaled_dot_product", "_efficient_attention", "_flash_attention", "_cudnn_rnn", "_thnn", "miopen_rnn")
"""Prefixes of operations that draw random numbers inside of a fused kernel."""


class RowRandom(TorchDispatchMode):
    """Draws random numbers for ``total`` rows, and uses those of ``size`` rows from ``start`` on.

    ``dim`` is the dim of the rows in the model's first input. It is preferred for tensors in which several dims could
    be that of the rows.
    """

    def __init__(self, start: int, size: int, total: int, dim: int) -> None:
        super().__init__()
        self._start, self._size, self._total, self._dim = start, size, total, dim
        # Whether random numbers were drawn, and why they could not be assigned to rows.
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
        dim = self._row_dim(own.shape)
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
        dim = self._row_dim(source.shape)
        if dim is None:
            return func(source, p, train)
        _, mask = func(self._new_whole(source, dim).fill_(1), p, train)
        mask = self._select_own(mask, source.shape, dim).clone()
        return source * mask * (0.0 if p == 1 else 1 / (1 - p)), mask

    def _from_sizes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a factory function, such as ``rand``, whose sizes are a list among its arguments."""
        number = next((index for index, value in enumerate(args) if isinstance(value, list | tuple)), None)
        dim = None if number is None else self._row_dim(args[number])
        if number is None or dim is None:
            return func(*args, **kwargs)
        shape = list(args[number])
        whole = func(*args[:number], self._whole_shape(shape, dim), *args[number + 1 :], **kwargs)
        return self._select_own(whole, shape, dim).clone()

    def _row_dim(self, shape: Sequence[int]) -> int | None:
        """Return the dim of a tensor's rows; None if it has no rows, so that every rank draws the same."""
        exact = [dim for dim, size in enumerate(shape) if size == self._size]
        if self._dim in exact:
            return self._dim
        if exact:
            if len(exact) > 1:
                self.problem = self.problem or f"random numbers of shape {tuple(shape)} have rows in several dims"
            return exact[0]
        return 0 if shape and shape[0] and shape[0] % self._size == 0 else None

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
    """Whether a call draws random numbers: dropout in evaluation mode, and attention without dropout, do not."""
    names = [item.name for item in func._schema.arguments]
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    if "dropout_p" in bound or "dropout_p" in names:
        return bool(bound.get("dropout_p", 0.0))
    if "dropout" in names and "train" in names:
        return bool(bound.get("dropout")) and bool(bound.get("train"))
    return not ("train" in names and bound.get("train") is False)
