"""The source files of modules that workers may lack or have in other versions.

On other machines these are all of the user's own modules, on this one those that code has loaded from a file by
their spec, which no import finds.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec

from accel_nb.notebook.messages import SentModule
from accel_nb.notebook.session.module_sync import FileStamp, is_installed, source_file_of, stamp_of

_MAX_FILES = 1000
_MAX_BYTES = 10 * 2**20
_SOURCE = ".py"
_ModulesKey = tuple[int, str]
"""A state of `sys.modules`: the number of modules, and the name of the newest."""


@dataclass(slots=True)
class SentUserModules:
    """The record of the modules that were sent to the workers of a pool."""

    _stamps: dict[str, FileStamp] = field(default_factory=dict)
    _imports: dict[str, tuple[FileStamp | None, list[str]]] = field(default_factory=dict)
    """By file its modification time and size, and the modules that it imports."""
    _left_out: set[str] = field(default_factory=set)
    _imported: list[str] = field(default_factory=list)
    """The top-level names of the user's imported modules."""
    _imported_key: _ModulesKey = (0, "")
    """The state of `sys.modules` for which `_imported` is valid."""
    _from_specs: dict[str, str] = field(default_factory=dict)
    """By name the files of modules that code has loaded by their specs and that no import finds."""
    _from_specs_key: _ModulesKey = (0, "")
    """The state of `sys.modules` for which `_from_specs` is valid."""

    def clear(self) -> None:
        """Record that workers have no modules of the notebook."""
        self._stamps.clear()
        self._left_out.clear()

    def collect(self, tree: ast.Module) -> tuple[list[SentModule], list[str]]:
        """Return modules that workers lack or have in an older version, and a line for each package that is too large.

        These are the user's own modules that the notebook has imported or that ``tree`` imports, and those that these
        import in turn; of a package all files of Python.
        """
        found: list[SentModule] = []
        lines: list[str] = []
        waiting = [*dict.fromkeys([*self._imported_here(), *_imports_of(tree)])]
        seen = {"accel_nb"}
        while waiting:
            top = waiting.pop()
            if top in seen:
                continue
            seen.add(top)
            files = _find_files(top)
            if _is_too_large([file for _, file, _ in files]):
                if top not in self._left_out:
                    self._left_out.add(top)
                    lines.append(f"the package {top} is too large to be sent: nodes import their own, if they have one")
                continue
            for name, file, is_package in files:
                module = self._read(name, file, is_package=is_package)
                if module is not None:
                    found.append(module)
                waiting += self._imports_in(file)
        return found, lines

    def collect_loaded_from_specs(self) -> list[SentModule]:
        """Return those modules of this process that no import finds and that workers lack or have in an older version.

        Code has loaded them by their specs, as PyTorch Geometric loads the files that it generates for a class.
        """
        if (key := _modules_key()) != self._from_specs_key:
            self._from_specs_key = key
            files = {name: source_file_of(module) for name, module in list(sys.modules.items())}
            self._from_specs = {name: file for name, file in files.items() if file is not None and not _is_found(name)}
        sent = (self._read(name, file, is_package=_is_package(file)) for name, file in self._from_specs.items())
        return [module for module in sent if module is not None]

    def _imported_here(self) -> list[str]:
        if (key := _modules_key()) != self._imported_key:
            self._imported_key = key
            files = {name: source_file_of(module) for name, module in list(sys.modules.items()) if name != "__main__"}
            self._imported = [name.partition(".")[0] for name, file in files.items() if file is not None]
        return self._imported

    def _read(self, name: str, file: str, *, is_package: bool) -> SentModule | None:
        """Return a module unless the workers have it in this version."""
        stamp = stamp_of(file)
        if stamp is None or self._stamps.get(name) == stamp:
            return None
        try:
            with open(file, "rb") as source:
                text = importlib.util.decode_source(source.read())
        except (OSError, SyntaxError, UnicodeDecodeError):  # the import on a worker fails as it would here
            return None
        self._stamps[name] = stamp
        return SentModule(name, file, text, is_package, *stamp)

    def _imports_in(self, file: str) -> list[str]:
        stamp = stamp_of(file)
        known = self._imports.get(file)
        if known is not None and known[0] == stamp:
            return known[1]
        try:
            with open(file, "rb") as source:
                found = list(_imports_of(ast.parse(source.read())))
        except (OSError, SyntaxError, ValueError):
            found = []
        self._imports[file] = stamp, found
        return found


def _modules_key() -> _ModulesKey:
    """Return how many modules are imported and the newest one, since visiting each of them takes milliseconds."""
    return len(sys.modules), next(reversed(sys.modules))


def _is_found(name: str) -> bool:
    """Return whether an import would find a module that is imported."""
    return name == "__main__" or _find(name) is not None


def _find(name: str) -> ModuleSpec | None:
    """Return how an import would load a module, or None; imports nothing, also where a failed import left no parent."""
    parent, path = name.rpartition(".")[0], None
    if parent in sys.modules:
        path = getattr(sys.modules[parent], "__path__", None)
    elif parent and (spec := _find(parent)) is not None:
        path = spec.submodule_search_locations
    if parent and path is None:  # no package, and without a path finders would look for the last part of the name alone
        return None
    finders = (
        getattr(finder, "find_spec", None) for finder in sys.meta_path
    )  # finders of the old protocol have no such method
    try:
        return next((spec for find in finders if find is not None and (spec := find(name, path)) is not None), None)
    except KeyError:  # a namespace package looks its parent up in sys.modules
        return None


def _is_package(file: str) -> bool:
    return os.path.basename(file) == f"__init__{_SOURCE}"


def _find_files(top: str) -> list[tuple[str, str, bool]]:
    """Return name, file and whether it is a package for the user's own module ``top`` and its submodules."""
    for entry in sys.path:
        folder = os.path.abspath(entry)
        package, file = os.path.join(folder, top), os.path.join(folder, top + _SOURCE)
        if is_installed(os.path.join(package, "")):
            continue
        if os.path.isfile(os.path.join(package, f"__init__{_SOURCE}")):
            return list(_files_of_package(top, package))
        if os.path.isfile(file):
            return [(top, file, False)]
    return []


def _files_of_package(package: str, folder: str) -> Iterator[tuple[str, str, bool]]:
    count = 0
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name.isidentifier() and name != "__pycache__")
        inner = os.path.relpath(place, folder)
        prefix = package if inner == os.curdir else f"{package}.{inner.replace(os.sep, '.')}"
        for file in sorted(files):
            stem, extension = os.path.splitext(file)
            if extension == _SOURCE and stem.isidentifier():
                is_package = _is_package(file)
                yield prefix if is_package else f"{prefix}.{stem}", os.path.join(place, file), is_package
                count += 1
                if count > _MAX_FILES:
                    return


def _is_too_large(files: list[str]) -> bool:
    sizes = [stamp[1] for file in files if (stamp := stamp_of(file)) is not None]
    return len(files) > _MAX_FILES or sum(sizes) > _MAX_BYTES


def _imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield the first parts of the names of the modules that a source imports absolutely."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]
