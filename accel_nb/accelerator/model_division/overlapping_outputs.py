"""Outputs of a call that overlap in memory, such as ``h`` and ``h[:, 0]``: a change in place of one is one of both.

Of such outputs one is gathered, and the others are made from it as the views that they are of this rank's rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from accel_nb.accelerator.model_division.row_layout import is_divisible


@dataclass(frozen=True)
class View:
    """The slices and the order of dims by which a tensor is a view of another one.

    Attributes:
        slices: the part of each dim of the other tensor: a slice, or the index of one that the view lacks.
        order: the order of the remaining dims.
        singles: the dims of one element that are then inserted.
        has_gradient: whether the view requires a gradient.
    """

    slices: tuple[slice | int, ...]
    order: tuple[int, ...]
    singles: tuple[int, ...]
    has_gradient: bool

    def of(self, base: Tensor) -> Tensor:
        """Return the view of a tensor with more rows than the one for which it was found."""
        view = base[self.slices].permute(self.order)
        for dim in self.singles:
            view = view.unsqueeze(dim)
        return view if self.has_gradient else view.detach()


def find_views(outputs: Sequence[tuple[Tensor, object]]) -> dict[int, tuple[Tensor, View]]:
    """Return, by the id of an output, of which other one it is a view, and how.

    Outputs come with the dim of their rows, or with what else they are. Of views with a gradient none are returned if
    the gradient of an output besides them and their base may pass through one: it would not through a new view.
    """
    by_memory: dict[int, list[tuple[Tensor, int]]] = {}
    for tensor, dim in outputs:
        if isinstance(dim, int) and _has_memory(tensor):
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append((tensor, dim))
    found: dict[int, tuple[Tensor, View]] = {}
    for sharing in by_memory.values():
        bases: list[tuple[Tensor, int]] = []
        # Largest first, and of equal ones those with a gradient.
        for tensor, dim in sorted(sharing, key=lambda item: (item[0].numel(), item[0].requires_grad), reverse=True):
            views = ((base, find_view(tensor, dim, base, base_dim)) for base, base_dim in bases if base is not tensor)
            base, view = next((item for item in views if item[1] is not None), (None, None))
            if base is not None and view is not None:
                found[id(tensor)] = base, view
            else:
                bases.append((tensor, dim))
    others = {id(tensor) for tensor, _ in outputs if tensor.requires_grad and id(tensor) not in found}
    return {key: item for key, item in found.items() if len(others) == 1 or not item[1].has_gradient}


def find_view(part: Tensor, part_dim: int, base: Tensor, base_dim: int) -> View | None:
    """Return how a tensor is a view of all rows of another one, or None; the rows are along the given dims."""
    if not _shares_storage(part, base) or part.dtype != base.dtype:
        return None
    if part.requires_grad and not (base.requires_grad and _viewed(part) is _viewed(base)):
        return None  # its gradient does not pass through the other tensor
    slices: list[slice | int] = [0] * base.dim()
    kept: dict[int, int] = {}
    waiting = sorted((dim for dim in range(part.dim()) if part.shape[dim] > 1), key=part.stride)
    rest = int(part.storage_offset()) - int(base.storage_offset())
    for dim in sorted(range(base.dim()), key=base.stride, reverse=True):
        stride, size = base.stride(dim), base.shape[dim]
        if size == 1 or stride == 0:
            continue
        start, rest = divmod(rest, stride)
        last, slices[dim] = start, start
        if waiting and part.stride(waiting[-1]) >= stride:
            kept[dim] = found = waiting.pop()
            step = part.stride(found) // stride
            last = start + (part.shape[found] - 1) * step
            slices[dim] = slice(start, last + 1, step)
            if part.stride(found) % stride:
                return None
        if start < 0 or last >= size:
            return None
    if waiting or rest or kept.get(base_dim) != part_dim or slices[base_dim] != slice(0, base.shape[base_dim], 1):
        return None
    slices[base_dim] = slice(None)
    remaining = [kept[dim] for dim in sorted(kept)]
    order = tuple(remaining.index(dim) for dim in sorted(remaining))
    singles = tuple(dim for dim in range(part.dim()) if dim not in remaining)
    return View(tuple(slices), order, singles, part.requires_grad)


def overlapping_pairs(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the pairs of numbers of tensors that are one tensor, or have elements in the same memory."""
    pairs = itertools.combinations(range(len(tensors)), 2)
    return [(one, other) for one, other in pairs if _overlaps(tensors[one], tensors[other])]


def _overlaps(one: Tensor, other: Tensor) -> bool:
    if one is other or not _shares_storage(one, other):
        return one is other
    if one.dtype != other.dtype:
        return True
    strides = sorted({*one.stride(), *other.stride()} - {0}, reverse=True)
    bounds = [(stride, _last_index(other, stride), _last_index(one, stride)) for stride in strides]
    return _has_solution(int(one.storage_offset()) - int(other.storage_offset()), bounds)


def _has_solution(total: int, bounds: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether ``total`` is a sum of multiples of the strides; a bound is a stride and how often up and down."""
    if not bounds:
        return total == 0
    (stride, up, down), *others = bounds
    most, least = sum(other * up for other, up, _ in others), -sum(other * down for other, _, down in others)
    first, last = max(-down, -((most - total) // stride)), min(up, (total - least) // stride)
    return any(_has_solution(total - stride * number, others) for number in range(first, last + 1))


def _last_index(tensor: Tensor, stride: int) -> int:
    return sum(int(size) - 1 for size, own in zip(tensor.shape, tensor.stride(), strict=True) if own == stride)


def _shares_storage(one: Tensor, other: Tensor) -> bool:
    return (
        _has_memory(one)
        and _has_memory(other)
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def _has_memory(tensor: Tensor) -> bool:
    return is_divisible(tensor) and not tensor.is_nested and not tensor.is_meta and tensor.numel() > 0


def _viewed(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base
