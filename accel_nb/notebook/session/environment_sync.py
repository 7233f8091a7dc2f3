"""State of the notebook's process that workers follow: environment variables, the text of cells, settings."""

from __future__ import annotations

import ast
import linecache
import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from IPython.core.getipython import get_ipython

from accel_nb.notebook.cells.future_imports import FUTURE_FLAGS, future_flags
from accel_nb.notebook.session.process_settings import REPEATED, find_changes, read_settings
from accel_nb.runtime.process.environment import GPU_VARIABLE, get_variable, notebook_variables


@dataclass(slots=True)
class EnvironmentSync:
    """Differences between this process and its workers since they were started or last updated."""

    _changed_names: set[str] = field(default_factory=set)
    _sent_sources: set[str] = field(default_factory=set)
    _settings: dict[str, Any] = field(default_factory=dict)

    def changed_variables(self, started_with: Mapping[str, str]) -> dict[str, str | None]:
        """Return the environment variables that differ, or once differed, from a fresh worker's; None for an unset one.

        ``CUDA_VISIBLE_DEVICES`` is left out, since it only takes effect when a process starts.
        """
        now = notebook_variables()
        for name in now.keys() | started_with.keys():
            if now.get(name) != started_with.get(name):
                self._changed_names.add(name)
        return {name: now.get(name) for name in sorted(self._changed_names - {GPU_VARIABLE})}

    def new_sources(self, codes: Iterable[types.CodeType]) -> dict[str, tuple[str, str]]:
        """Return by file name the source text of ``codes``, for tracebacks, and the notebook's name of that cell.

        Sources that an earlier call returned are left out, and so are existing files, which workers read themselves.
        """
        found: dict[str, tuple[str, str]] = {}
        for name in {code.co_filename for code in codes} - self._sent_sources:
            self._sent_sources.add(name)
            if not os.path.exists(name) and (lines := linecache.getlines(name)):
                found[name] = "".join(lines), _display_name(name)
        return found

    def changed_settings(self) -> dict[str, Any]:
        """Return the settings of the process that have changed since the last call, and those of `REPEATED`."""
        before, self._settings = self._settings, read_settings(self._settings)
        repeated = {name: value for name, value in self._settings.items() if name in REPEATED}
        return find_changes(before, self._settings) | repeated

    def record_returned(self, settings: Mapping[str, Any]) -> None:
        """Record settings that a cell has changed on the workers: one that the notebook changes back is sent again."""
        for name, value in settings.items():
            known: Any = self._settings.get(name)
            has_items = isinstance(value, dict) and isinstance(known, dict)
            self._settings[name] = {**known, **value} if has_items else value

    def reset(self) -> None:
        """Return every text and setting again from the next call on, since some worker may not have them."""
        self._sent_sources.clear()
        self._settings = {}


def _display_name(file: str) -> str:
    """Return IPython's name of a cell's file, such as ``In[3]``; empty if it has none, as IPython before 8."""
    format_name = getattr(getattr(get_ipython(), "compile", None), "format_code_name", None)
    named = None if format_name is None else format_name(file)
    return "" if named is None else str(named[1])


def compiler_flags(tree: ast.Module) -> int:
    """Return the ``__future__`` flags to compile a cell with, and add those that it imports to the notebook's compiler.

    In IPython, an import from ``__future__`` applies to all later cells.
    """
    own = future_flags(tree)
    shell = get_ipython()
    if shell is None:
        return own
    before = shell.compile.flags & FUTURE_FLAGS
    shell.compile.flags |= own
    return before


def has_other_gpus(started_with: Mapping[str, str]) -> bool:
    """Return whether the notebook has changed the visible GPUs since the workers started."""
    return get_variable(GPU_VARIABLE, None) != started_with.get(GPU_VARIABLE)
