"""Plain values that a model's code may branch on: flags, numbers and strings in attributes and global variables.

A row layout holds for calls with the same plain values, among them members of enums, tuples of plain values, and
functions and classes, which may be replaced by others. So a dropout that is enabled later, or a layer that an epoch
number switches on, leads to another check of the model. Of another object its class is compared, and its attributes.
"""

from __future__ import annotations

import functools
import types
from enum import Enum
from typing import Any

import numpy
import torch
from torch import nn

from accel_nb.accelerator.model_division.reachable_state import PLAIN_TYPES, find_plain_sources, is_searched

_PLAIN = frozenset((*PLAIN_TYPES, torch.dtype, torch.device, types.FunctionType, types.BuiltinFunctionType))
_MISSING = object()


class PlainState:
    """The values that a model's code may read, by container and key; searched again if one is added or replaced."""

    def __init__(self, model: nn.Module) -> None:
        found = list(find_plain_sources(model))
        self._containers = [source.container for source in found if source.is_complete]
        self._sizes = self._current_sizes()
        places = [(source.container, key, source.container[key]) for source in found for key in source.keys]
        self._plain = [(container, key) for container, key, value in places if type(value) in _PLAIN]
        self._others = [(container, key) for container, key, value in places if type(value) not in _PLAIN]
        self._objects = [item for item in places if is_searched(item[2]) and not isinstance(item[2], nn.Module)]

    @property
    def is_current(self) -> bool:
        """Whether no container of values has become longer or shorter, and no object was replaced by another one."""
        return self._sizes == self._current_sizes() and all(
            _item(container, key) is value for container, key, value in self._objects
        )

    def values(self) -> tuple[Any, ...]:
        """Return the current values; a value that is not plain is given by its type."""
        others = tuple([_state_of(_item(container, key)) for container, key in self._others])
        try:
            found = tuple([container[key] for container, key in self._plain])
        except (KeyError, IndexError):
            found = tuple([_item(container, key) for container, key in self._plain])
        if not _PLAIN.issuperset(map(type, found)):
            found = tuple(map(_state_of, found))
        return found, others

    def _current_sizes(self) -> list[int]:
        return list(map(len, self._containers))


def _item(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (KeyError, IndexError):
        return _MISSING


def _state_of(value: Any) -> Any:
    if type(value) in _PLAIN or isinstance(value, Enum | type | numpy.generic):
        return value
    if isinstance(value, tuple):
        return tuple(map(_state_of, tuple.__iter__(value)))  # a class of its own may not be iterable
    if isinstance(value, types.MethodType):
        return value.__func__
    return _state_of(value.func) if isinstance(value, functools.partial) else type(value)
