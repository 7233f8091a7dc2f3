"""Plain values that a model's code may branch on: flags, numbers and strings in attributes and global variables.

A row layout holds for calls with the same plain values, members of enums among them. So a dropout that is enabled
later, or a layer that an epoch number switches on, makes the model be checked again.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import nn

from accel_nb.accelerator.model_division.reachable_state import PLAIN_TYPES, find_plain_sources

_PLAIN = frozenset(PLAIN_TYPES)


class PlainState:
    """The places of plain values that a model's code may read; searched again when a value is added."""

    def __init__(self, model: nn.Module) -> None:
        found = list(find_plain_sources(model))
        self._containers = [source.container for source in found if source.is_complete]
        self._sizes = self._current_sizes()
        self._sources = [
            (source.container, key)
            for source in found
            for key in source.keys
            if isinstance(source.container[key], (*PLAIN_TYPES, Enum))
        ]

    @property
    def is_current(self) -> bool:
        """Whether no container of values has become longer or shorter."""
        return self._sizes == self._current_sizes()

    def values(self) -> tuple[Any, ...]:
        """Return the current values; a value that is no longer plain is given by its type."""
        try:
            found = tuple([container[key] for container, key in self._sources])
        except (KeyError, IndexError):
            return tuple([_value(container, key) for container, key in self._sources])
        if _PLAIN.issuperset(map(type, found)):
            return found
        return tuple([_value(container, key) for container, key in self._sources])

    def _current_sizes(self) -> list[int]:
        return list(map(len, self._containers))


def _value(container: Any, key: Any) -> Any:
    try:
        value = container[key]
    except (KeyError, IndexError):
        return None
    return value if type(value) in _PLAIN or isinstance(value, Enum) else type(value)
