"""Modules that a worker imports from sources that the notebook has sent, since it would not find them."""

from __future__ import annotations

import linecache
import os
import sys
import types
from collections.abc import Iterable, Sequence
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader

from accel_nb.notebook.messages import SentModule


class SentModules(MetaPathFinder):
    """Finds the modules that were sent, before those of this machine.

    Files have the paths that they have on the notebook's machine, also in tracebacks.
    """

    def __init__(self) -> None:
        self._modules: dict[str, SentModule] = {}
        self._by_file: dict[str, SentModule] = {}

    def add(self, modules: Iterable[SentModule]) -> None:
        """Add modules, or newer versions of them, for imports from now on."""
        for module in modules:
            self._modules[module.name] = self._by_file[module.file] = module
            lines = module.text.splitlines(keepends=True)
            linecache.cache[module.file] = (len(module.text), None, lines, module.file)
        if self._modules and self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_file(self, file: str) -> SentModule | None:
        """Return the module of a file on the notebook's machine; None if it was not sent."""
        return self._by_file.get(file)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that was sent; None for any other."""
        module = self._modules.get(fullname)
        if module is None:
            return None
        spec = spec_from_loader(fullname, _Loader(module), origin=module.file, is_package=module.is_package)
        assert spec is not None
        spec.has_location = True
        if module.is_package:
            spec.submodule_search_locations = [os.path.dirname(module.file)]
        return spec


class _Loader(ExecutionLoader):
    """Loads one module from its source."""

    def __init__(self, module: SentModule) -> None:
        self._module = module

    def get_filename(self, fullname: str) -> str:
        return self._module.file

    def get_source(self, fullname: str) -> str:
        return self._module.text

    def is_package(self, fullname: str) -> bool:
        return self._module.is_package
