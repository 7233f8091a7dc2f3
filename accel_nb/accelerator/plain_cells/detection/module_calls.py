"""Hooks around the calls of all modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]
"""A function that takes a module and its arguments, as ``nn.Module.__call__``."""


class ModuleCallHooks:
    """Replaces ``nn.Module.__call__`` while at least one of two hooks is set.

    ``before`` is called without arguments before each call. ``around`` is called with the original ``__call__``,
    the module, its arguments and its keyword arguments, and returns the module's result.
    """

    def __init__(self) -> None:
        self._before: Callable[[], object] | None = None
        self._around: Callable[[Forward, nn.Module, Any, Any], Any] | None = None
        self._original: Forward | None = None

    def set_before(self, hook: Callable[[], object] | None) -> None:
        """Set or remove ``before``."""
        self._before = hook
        self._update()

    def set_around(self, hook: Callable[[Forward, nn.Module, Any, Any], Any] | None) -> None:
        """Set or remove ``around``."""
        self._around = hook
        self._update()

    def close(self) -> None:
        """Remove both hooks."""
        self._before = self._around = None
        self._update()

    def _update(self) -> None:
        if self._before is None and self._around is None:
            if self._original is not None:
                nn.Module.__call__, self._original = self._original, None
        elif self._original is None:
            self._original = nn.Module.__call__
            nn.Module.__call__ = self._with_hooks(self._original)

    def _with_hooks(self, original: Forward) -> Forward:
        @functools.wraps(original)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._before is not None:
                self._before()
            if self._around is not None:
                return self._around(original, module, args, kwargs)
            return original(module, *args, **kwargs)

        return __call__
