"""Creation of subclasses of the notebook's classes without their hooks for new subclasses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_HOOKS = frozenset({"__init_subclass__"})
_HOOKS_OF_METACLASSES = frozenset({"__new__", "__init__"})


@contextmanager
def without_subclass_hooks(bases: Iterable[type], metaclass: type = type) -> Iterator[None]:
    """Disable the notebook's code that runs when subclasses of ``bases`` are created.

    This code is their ``__init_subclass__``, and ``__new__`` and ``__init__`` of their metaclasses and of
    ``metaclass``.
    """
    bases = tuple(bases)
    makers = [metaclass, *map(type, bases)]
    found = [*_hooks(bases, _HOOKS), *_hooks(makers, _HOOKS_OF_METACLASSES)]
    try:
        for owner, name, _ in found:
            type.__delattr__(owner, name)  # a metaclass of the notebook may forbid it
        yield
    finally:
        for owner, name, hook in found:
            type.__setattr__(owner, name, hook)


def _hooks(kinds: Iterable[type], names: frozenset[str]) -> Iterator[tuple[type, str, Any]]:
    own = {parent for kind in kinds for parent in _parents(kind) if parent.__module__ == "__main__"}
    yield from ((kind, name, vars(kind)[name]) for kind in own for name in names & vars(kind).keys())


def _parents(kind: Any) -> tuple[type, ...]:
    return kind.__mro__
