"""Reloading of the user's own modules on the workers after they have changed.

A worker reports each of the user's modules that it imports, with the modification time and size of its file. Before
each cell the notebook compares these: workers reload a module if the notebook has reloaded it since, or if its file has
changed since. Modules of installed libraries are ignored.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any, Protocol

from IPython.core.getipython import get_ipython

import accel_nb
from accel_nb.errors import ShippingError, error_text
from accel_nb.installed_files import is_of_library
from accel_nb.notebook.messages import ReloadMode, SentModule
from accel_nb.runtime.process.user_code import modules_imported_after

FileStamp = tuple[int, int]
"""Modification time and size of a file."""
_UNKNOWN: FileStamp = (0, 0)

_OWN_FOLDER = os.path.join(os.path.dirname(accel_nb.__file__), "")
_AUTORELOAD = "autoreload"


def source_file_of(module: Any) -> str | None:
    """Return the source file of one of the user's own modules; None for any other module."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    if not isinstance(origin, str) or not origin.endswith(".py") or is_installed(origin):
        return None
    return origin


def is_installed(path: str) -> bool:
    """Return whether a path belongs to an installed library, Python or this package."""
    return path.startswith(_OWN_FOLDER) or is_of_library(path)


def stamp_of(file: str) -> FileStamp | None:
    """Return modification time and size of a file; None if it cannot be read."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@dataclass(slots=True)
class _Imported:
    """A module that workers have imported: its file, the file's stamp then, and the spec of the notebook's module."""

    file: str
    stamp: FileStamp
    spec: Any


@dataclass(slots=True)
class ImportedModuleRecord:
    """The kernel's record of the modules that its workers have imported."""

    _modules: dict[str, _Imported] = field(default_factory=dict)

    def record(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """Record the reports of ranks after a cell: by name, the module's file and its stamp at the import."""
        stamps: dict[str, set[FileStamp]] = {}
        for report in reports:
            for name, (file, *stamp) in report.items():
                known = self._modules.get(name)
                if name in stamps and (known is None or known.file != file):
                    # Each rank has generated a file of its own, which is not edited.
                    self._modules.pop(name, None)
                    continue
                found = stamps.setdefault(name, set())
                found.add((stamp[0], stamp[1]))
                # Ranks that imported different versions reload the module with the next cell.
                self._modules[name] = _Imported(file, min(found) if len(found) == 1 else _UNKNOWN, _spec_of(name))

    def clear(self) -> None:
        """Record that the workers are new and have imported nothing."""
        self._modules.clear()

    def modules_to_reload(self) -> dict[str, ReloadMode]:
        """Return the modules that the workers must reload, and how."""
        found: dict[str, ReloadMode] = {}
        updates = _has_autoreload()
        for name, imported in self._modules.items():
            spec = _spec_of(name)
            if imported.spec is not None and spec is not None and spec is not imported.spec:
                found[name] = "update" if updates else "again"  # each load of a module creates a new spec
            elif (stamp := stamp_of(imported.file)) is not None and stamp != imported.stamp:
                found[name] = "edited"
            elif imported.spec is None:
                imported.spec = spec
        return found

    def describe_reloads(self, changed: Mapping[str, ReloadMode]) -> list[str]:
        """Return a line about the modules that the workers reload, if there are any."""
        if not changed:
            return []
        line = f"reloaded on the workers: {', '.join(sorted(changed))}"
        edited = sorted(name for name, mode in changed.items() if mode == "edited" and name in sys.modules)
        if edited and not _has_autoreload():
            line += f" · edited, and the notebook itself still has the old code of {', '.join(edited)}"
        return [line]


def _spec_of(name: str) -> Any:
    return getattr(sys.modules.get(name), "__spec__", None)


def _has_autoreload() -> bool:
    """Return whether IPython's autoreload extension, which reloads edited modules before each cell, is loaded."""
    shell = get_ipython()
    loaded = getattr(getattr(shell, "extension_manager", None), "loaded", ())
    return any(name.rpartition(".")[2] == _AUTORELOAD for name in loaded)


class SentFiles(Protocol):
    """The files that the notebook has sent to a worker on another machine."""

    def find_file(self, file: str) -> SentModule | None:
        """Return the module of a file on the notebook's machine; None if it was not sent."""
        ...


class WorkerModules:
    """A worker's record of the user's own modules that it has imported."""

    def __init__(self, sent: SentFiles) -> None:
        self._sent = sent
        self._checked = set(modules_imported_after(__name__))
        self._files: dict[str, str] = {}
        self._unreported: dict[str, tuple[str, int, int]] = {}
        self._began_ns = time.time_ns()
        # Objects of earlier versions of modules, which `superreload` updates.
        self._old_objects: dict[Any, Any] = {}

    def begin_run(self, used: Iterable[str]) -> None:
        """Import the modules that a cell uses as attributes of their packages; record the time at which it begins."""
        for name in used:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:  # code that uses it gets Python's error
                continue
            except Exception as error:  # the module may raise anything
                raise ShippingError(
                    f"the module {name} cannot be imported on the workers: {type(error).__name__}: "
                    f"{error_text(error)}. Leave it out of the cell."
                ) from error
        self._began_ns = time.time_ns()

    def new_imports(self) -> dict[str, tuple[str, int, int]]:
        """Return by name the modules that were imported or reloaded since the last call."""
        self._find_new_imports()
        found, self._unreported = self._unreported, {}
        return found

    def _find_new_imports(self) -> None:
        for name in [name for name in modules_imported_after(__name__) if name not in self._checked]:
            self._checked.add(name)
            if (file := source_file_of(sys.modules[name])) is not None and (stamp := self._stamp_of(file)) is not None:
                self._files[name] = file
                # A file written while the cell ran may have changed after its import: its stamp is unknown.
                self._unreported[name] = (file, *(stamp if stamp[0] < self._began_ns else _UNKNOWN))

    def reload(self, changed: Mapping[str, ReloadMode]) -> None:
        """Reload modules, each after those that it imports. Raise ShippingError for one that cannot be loaded."""
        self._find_new_imports()
        known = {name: file for name, file in self._files.items() if name in sys.modules}
        imports = {name: set(_find_imports(name, file, self._read(file), known)) for name, file in known.items()}
        modes: dict[str, ReloadMode] = {name: mode for name, mode in changed.items() if name in known}
        for name in _find_importers([name for name, mode in modes.items() if mode == "edited"], imports):
            modes.setdefault(name, "edited")
        for name in _sort_by_imports(modes, imports):
            stamp = self._stamp_of(known[name])
            try:
                self._reload_one(sys.modules[name], modes[name])
            except Exception as error:  # the user's module may raise anything
                raise ShippingError(
                    f"the module {name} has changed and cannot be reloaded on the workers: "
                    f"{type(error).__name__}: {error_text(error)}. Correct the file and run the cell again."
                ) from error
            if stamp is not None:
                self._unreported[name] = (known[name], *stamp)

    def _stamp_of(self, file: str) -> FileStamp | None:
        """Return the stamp of a file on the notebook's machine if it was sent, else of the one here."""
        sent = self._sent.find_file(file)
        return stamp_of(file) if sent is None else (sent.mtime_ns, sent.size)

    def _read(self, file: str) -> str | bytes:
        """Return the source of a module; nothing if it cannot be read."""
        sent = self._sent.find_file(file)
        if sent is not None:
            return sent.text
        try:
            with open(file, "rb") as source:
                return source.read()
        except OSError:  # reloading the module, if needed, raises the error
            return b""

    def _reload_one(self, module: types.ModuleType, mode: ReloadMode) -> None:
        importlib.invalidate_caches()
        load = partial(_load_again, spec=module.__spec__)  # superreload removes the attribute
        if mode == "again":
            load(module)
            return
        _superreload()(module, load, self._old_objects)
        for name, part in list(sys.modules.items()):  # superreload removes a package's attributes for its submodules
            package, _, last = name.rpartition(".")
            if package == module.__name__ and not hasattr(module, last):
                setattr(module, last, part)


def _load_again(module: types.ModuleType, spec: ModuleSpec | None) -> types.ModuleType:
    """Reload a module; one that code has loaded by its spec, and that no import finds, from the file of ``spec``."""
    try:
        return importlib.reload(module)
    except ModuleNotFoundError as error:
        if error.name != module.__name__ or spec is None or spec.loader is None:
            raise
    module.__spec__, module.__file__ = spec, spec.origin
    spec.loader.exec_module(module)
    return module


def _superreload() -> Any:
    """Return IPython's function. Before IPython 8 its module imports ``imp``, which Python 3.12 does not have."""
    has_replaced = sys.modules.setdefault("imp", importlib) is importlib
    try:
        from IPython.extensions.autoreload import superreload
    finally:
        if has_replaced:
            del sys.modules["imp"]
    return superreload


def _find_imports(name: str, file: str, source: str | bytes, known: Iterable[str]) -> Iterator[str]:
    """Yield the ``known`` modules that a module's source imports, at any depth of nesting."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # reloading the module, if needed, raises the error
        return
    package = name if os.path.basename(file) == "__init__.py" else name.rpartition(".")[0]
    mentioned: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            mentioned.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            mentioned |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    for other in known:
        if other != name and any(item == other or item.startswith(f"{other}.") for item in mentioned):
            yield other


def _find_importers(names: Iterable[str], imports: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that import one of ``names``, directly or through others."""
    found, waiting = set[str](), set(names)
    while waiting:
        waiting = {name for name, others in imports.items() if others & waiting} - found
        found |= waiting
    return found


def _sort_by_imports(names: Iterable[str], imports: Mapping[str, set[str]]) -> list[str]:
    """Return names in topological order, each after those that it imports; in any order within an import cycle."""
    wanted = dict.fromkeys(names)
    order: dict[str, None] = {}
    begun: set[str] = set()

    def add(name: str) -> None:
        if name in begun:
            return
        begun.add(name)
        for other in sorted(imports.get(name, ())):
            add(other)
        if name in wanted:
            order[name] = None

    for name in wanted:
        add(name)
    return list(order)
