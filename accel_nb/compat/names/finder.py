"""The import finder for ``accelerate``: its modules, and the metadata with the version that libraries check."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_nb.compat.names.table import MODULES, reason_for
from accel_nb.compat.names.unsupported import PACKAGE
from accel_nb.errors import MisuseError

COMPATIBLE_VERSION = "1.15.0"
"""The version of accelerate whose names and semantics are provided, reported to libraries."""
_HOME_PAGE = "https://github.com/huggingface/accelerate"  # by which libraries recognize the package
REAL_PACKAGE_MODULES = (f"{PACKAGE}.commands", f"{PACKAGE}.test_utils")
"""Modules used from the real package, if it is installed: commands that are not ours, helpers of tests."""


def install() -> None:
    """Make ``import accelerate`` and its submodules import accel_nb, in this process; a second call does nothing.

    Raises `MisuseError` if the real package is imported already: a program would use both.
    """
    if is_installed():
        return
    imported = sorted(name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}."))
    if imported:
        raise MisuseError(
            f"{imported[0]} is imported already, from {getattr(sys.modules[imported[0]], '__file__', None)}: call "
            "accel_nb.compat.install() before anything imports it (restart the kernel, or the process)"
        )
    sys.meta_path.insert(0, Finder())


def uninstall() -> None:
    """Undo `install`: later imports find the real package, if installed; imported objects stay usable."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    modules = sys.modules.items()
    for name in [name for name, module in modules if isinstance(module, _Module) or _is_in_real_package(name)]:
        del sys.modules[name]


def is_installed() -> bool:
    """Return whether ``import accelerate`` imports accel_nb."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


class _Module(ModuleType):
    """A module that imports its names on access, so that importing it is fast."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__" and self.__name__ == PACKAGE:
            return COMPATIBLE_VERSION
        places = MODULES[self.__name__]
        if name == "__all__":
            return sorted(name for name, place in places.items() if _exists(place))
        if name in places:
            value = _find(places[name], f"{self.__name__}.{name}")
            vars(self)[name] = value
            return value
        if f"{self.__name__}.{name}" in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        # The import system turns this into an ImportError, for which `Finder.find_spec` has the reason.
        raise AttributeError(_unsupported_message(f"{self.__name__}.{name}"), name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, _Module) and name in MODULES[self.__name__]:
            return  # if a submodule and an object have the same name (tqdm), the attribute is the object
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MODULES[self.__name__]})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules and the distribution of the package, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of the package; raises ModuleNotFoundError for an unsupported one.

        ``from MODULE import NAME`` imports a module NAME if there is no such attribute, and raises the error only if
        its ``name`` is not that of the module. It does so only if MODULE is a package, so every module is one.
        """
        if fullname in MODULES:
            return importlib.machinery.ModuleSpec(fullname, self, origin="accel_nb", is_package=True)
        parent, _, _ = fullname.rpartition(".")
        if parent.partition(".")[0] == PACKAGE:
            if _is_in_real_package(fullname) and (found := _find_in_real_package(fullname)) is not None:
                return found
            raise ModuleNotFoundError(_unsupported_message(fullname), name=parent)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return an empty module; its file is this one, since programs look for it."""
        module = _Module(spec.name, f"The names of {spec.name} that accel_nb provides.")
        module.__file__ = __file__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are imported on access."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Return the package's distribution if the context is its name, or any."""
        name = None if context is None else context.name
        return [_Distribution()] if name is None or name.lower() == PACKAGE else []


class _Distribution(importlib.metadata.Distribution):
    """The metadata of the package: name and version."""

    def read_text(self, filename: str) -> str | None:
        if filename not in ("METADATA", "PKG-INFO"):
            return None
        fields = {
            "Metadata-Version": "2.1",
            "Name": PACKAGE,
            "Version": COMPATIBLE_VERSION,
            "Summary": "offered by accel_nb",
            "Home-page": _HOME_PAGE,
        }
        return "".join(f"{name}: {value}\n" for name, value in fields.items())

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


def _is_in_real_package(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in REAL_PACKAGE_MODULES)


def _find_in_real_package(fullname: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module of the real package without importing it, or None if it is not there."""
    real = importlib.machinery.PathFinder.find_spec(PACKAGE)
    if real is None or real.submodule_search_locations is None:
        return None
    folders = fullname.split(".")[1:-1]
    places = [str(Path(place, *folders)) for place in real.submodule_search_locations]
    return importlib.machinery.PathFinder.find_spec(fullname, places)


def _find(place: str, requested: str) -> Any:
    module, _, attribute = place.partition(":")
    found = importlib.import_module(module)
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        raise AttributeError(_unsupported_message(requested)) from error


def _exists(place: str) -> bool:
    """Return whether a place ``module:attribute`` exists; names of ``accel_nb`` itself must be in its ``__all__``."""
    module, _, attribute = place.partition(":")
    return module != "accel_nb" or attribute in importlib.import_module(module).__all__


def _unsupported_message(requested: str) -> str:
    reason = reason_for(requested)
    return f"{requested} is not offered by accel_nb: {reason}. accel_nb.compat.uninstall() restores the real package"
