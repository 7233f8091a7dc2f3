"""What a cell finds around it in the notebook, other than names: variables, reloaded modules, the text of cells."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from IPython.core.getipython import get_ipython

from accel_nb.runtime.environment import notebook_variables, variable

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
_LIBRARIES = tuple(os.path.join(sysconfig.get_paths()[key], "") for key in ("stdlib", "purelib", "platlib"))


@dataclass(slots=True)
class Surroundings:
    """Tells what changed since the workers were started or last told."""

    _touched: set[str] = field(default_factory=set)
    _specs: dict[str, Any] = field(default_factory=dict)
    _sources: set[str] = field(default_factory=set)

    def variables(self, started_with: Mapping[str, str]) -> dict[str, str | None]:
        """Return the environment variables that have ever differed from those of a fresh worker, None where unset.

        The devices that a process sees are settled when it starts: that variable is left out.
        """
        now = notebook_variables()
        for name in now.keys() | started_with.keys():
            if now.get(name) != started_with.get(name):
                self._touched.add(name)
        return {name: now.get(name) for name in sorted(self._touched - {GPU_VARIABLE})}

    def reloaded(self, values: Iterable[Any]) -> list[str]:
        """Return the modules of the user's own behind ``values`` that were loaded anew since this was last asked."""
        found: list[str] = []
        for name in dict.fromkeys(map(_module_name, values)):
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            if spec is None or not _is_users(spec.origin):
                continue
            if self._specs.setdefault(name, spec) is not spec:  # loading again makes a new one
                self._specs[name] = spec
                found.append(name)
        return found

    def sources(self, codes: Iterable[types.CodeType]) -> dict[str, tuple[str, str]]:
        """Return by file name the text that ``codes`` were defined in, for tracebacks, and what the notebook calls it.

        Files that exist are read where they are needed; what was returned once is not returned again.
        """
        found: dict[str, tuple[str, str]] = {}
        for name in {code.co_filename for code in codes} - self._sources:
            self._sources.add(name)
            if not os.path.exists(name) and (lines := linecache.getlines(name)):
                found[name] = "".join(lines), _shown_name(name)
        return found

    def forget_sources(self) -> None:
        """Return every text again: the workers are new."""
        self._sources.clear()


def _shown_name(file: str) -> str:
    """Return what IPython calls a cell's file, such as ``In[3]``; empty where it has no name for it.

    IPython before 8 has none: its tracebacks show the name of the file.
    """
    format_name = getattr(getattr(get_ipython(), "compile", None), "format_code_name", None)
    named = None if format_name is None else format_name(file)
    return "" if named is None else str(named[1])


def sees_other_gpus(started_with: Mapping[str, str]) -> bool:
    """Whether the notebook has changed which GPUs are visible since then."""
    return variable(GPU_VARIABLE, None) != started_with.get(GPU_VARIABLE)


def _module_name(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, type | types.FunctionType):
        return value.__module__ or ""
    return type(value).__module__


def _is_users(origin: str | None) -> bool:
    if not origin or not origin.endswith(".py"):
        return False
    return not origin.startswith(_LIBRARIES)
