"""Functions that the notebook and the user's own modules have imported by name, as in ``from torch import save``.

Such names refer to the function itself, so that they would bypass its replacement while a plain cell runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from accel_nb.runtime.process.user_code import is_user_module, modules_imported_after


class ImportedNames:
    """Binds names of replaced functions to the replacements, until `restore` is called."""

    def __init__(self) -> None:
        # By id: the functions that are replaced now, each with its owner and its name there.
        self._replaced: dict[int, tuple[Any, Any, str]] = {}
        # By id: the replacements, each with its function.
        self._replacements: dict[int, tuple[Any, Any]] = {}
        self._bound: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._is_done = False

    def add(self, original: Any, owner: Any, name: str, replacement: Any) -> None:
        """Record that ``owner.name``, which was ``original``, is replaced by ``replacement``."""
        self._replaced.setdefault(id(original), (original, owner, name))
        self._replacements[id(replacement)] = replacement, original

    def apply(self, namespace: dict[str, Any]) -> None:
        """Bind names that refer to replaced functions to the replacements, in a notebook and in the user's modules.

        Does nothing after the first time in a cell.
        """
        if self._is_done:
            return
        self._is_done = True
        for scope in (namespace, *_user_scopes()):
            for key, value in list(scope.items()):
                if id(value) in self._replaced:
                    original, owner, name = self._replaced[id(value)]
                    scope[key] = function = _delegate_to(owner, name, original)
                    self._bound.append((scope, key, original, function))

    def restore(self, namespace: dict[str, Any]) -> None:
        """Bind the names to the original functions again, except for those that the cell has bound to other values.

        Also bind back the names by which the cell has imported functions while they were replaced, in ``namespace`` and
        in the user's modules.
        """
        for scope, key, original, function in self._bound:
            if scope.get(key) is function:
                scope[key] = original
        for scope in (namespace, *_user_scopes()):
            for key, value in list(scope.items()):
                if id(value) in self._replacements:
                    scope[key] = self._replacements[id(value)][1]
        self._bound.clear()
        self._replaced.clear()
        self._replacements.clear()
        self._is_done = False


def _delegate_to(owner: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``owner.name`` as it is at the time of the call: it may be replaced again.

    A replacement with the attribute ``inspects_caller`` is returned itself, so that its caller is the user's code.
    """
    replacement = getattr(owner, name)
    if getattr(replacement, "inspects_caller", False):
        return replacement

    @functools.wraps(original)
    def delegate(*args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)

    return delegate


def _user_scopes() -> Iterator[dict[str, Any]]:
    # This module is imported before a cell runs, and so before the user's modules.
    for name in modules_imported_after(__name__):
        module = sys.modules.get(name)
        if module is not None and name != "__main__" and is_user_module(name):
            yield vars(module)
