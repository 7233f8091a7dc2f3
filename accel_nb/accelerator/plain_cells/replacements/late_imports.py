"""Modules that a cell imports while it runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextmanager
def observed_imports(names: Collection[str], on_import: Callable[[], object]) -> Iterator[None]:
    """Call ``on_import`` after each of the modules in ``names`` that is imported for the first time in the block."""
    finder = _Finder(names, on_import)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the cell's code may have set another list
            sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds a module by the other finders, and adds a call after its loader has executed it."""

    def __init__(self, names: Collection[str], on_import: Callable[[], object]) -> None:
        self._names = set(names)
        self._on_import = on_import

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        self._names.remove(fullname)  # find_spec below searches all finders, this one too
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._names.add(fullname)  # code may search for a module, or fail to import it, before it imports it
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._observe(fullname, spec.loader)
        return spec

    def _observe(self, name: str, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # another observer may have removed it
            original(module)
            self._names.discard(name)
            self._on_import()

        with suppress(AttributeError):  # a loader with slots
            loader.exec_module = exec_module
