"""Subclasses that the notebook does not define, for which its ``__init_subclass__`` methods must not be called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_HOOK = "__init_subclass__"


@contextmanager
def without_subclass_hooks(bases: Iterable[type]) -> Iterator[None]:
    """Leave out the ``__init_subclass__`` of the notebook's classes when subclasses of ``bases`` are made."""
    parents = {parent for base in bases for parent in base.__mro__ if parent.__module__ == "__main__"}
    hooks = {parent: vars(parent)[_HOOK] for parent in parents if _HOOK in vars(parent)}
    for parent in hooks:
        delattr(parent, _HOOK)
    try:
        yield
    finally:
        for parent, hook in hooks.items():
            setattr(parent, _HOOK, hook)
