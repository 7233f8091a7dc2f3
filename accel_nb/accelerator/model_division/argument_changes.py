"""Changes that a forward pass makes to its arguments, such as an operation in place or a new item of a dict.

On one device the caller finds them. A divided call passes rows of the tensors in new containers, so they would be lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from accel_nb.runtime.tensors.nested import find_tensors, map_tensors
from accel_nb.runtime.tensors.versions import outside_inference_mode, version_of

CHANGES_ARGUMENTS = "its code changes its arguments"


class ArgumentChanges:
    """Records arguments before a call. Changes of tensors that were made in ``torch.inference_mode`` are not found."""

    def __init__(self, nested: Any) -> None:
        self._tensors = [(tensor, *_state_of(tensor)) for tensor in find_tensors(nested)]
        self._containers = [(container, _items_of(container)) for container in _containers_in(nested)]

    def has_any(self) -> bool:
        """Return whether a tensor was written or began to require gradients, or a container has other items."""
        return any(_state_of(tensor) != tuple(before) for tensor, *before in self._tensors) or any(
            not _is_same(_items_of(container), before) for container, before in self._containers
        )


def copied_arguments(nested: Any) -> Any:
    """Return copies of arguments whose changes can be found; parameters are not copied."""
    with outside_inference_mode():
        return map_tensors(lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.clone(), nested)


def _state_of(tensor: Tensor) -> tuple[int, bool]:
    return version_of(tensor), tensor.requires_grad


def _containers_in(nested: Any) -> Iterator[Any]:
    if isinstance(nested, Tensor):
        return
    is_object = dataclasses.is_dataclass(nested) and not isinstance(nested, type)
    if is_object or isinstance(nested, Mapping | list):
        yield nested
    if is_object or isinstance(nested, Mapping | list | tuple):
        for _, value in _items_of(nested):
            yield from _containers_in(value)


def _items_of(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, Mapping):
        return list(container.items())
    if isinstance(container, list | tuple):
        return list(enumerate(container))
    return [(item.name, getattr(container, item.name, None)) for item in dataclasses.fields(container)]


def _is_same(items: list[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    """Return whether items have the same keys, in order, and are the same objects."""
    return len(items) == len(before) and all(
        key == other and value is old for (key, value), (other, old) in zip(items, before, strict=True)
    )
