"""The files of Python's standard library and of installed packages, as opposed to the user's own."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path

_PATHS = sysconfig.get_paths()
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


@functools.cache
def is_of_library(file: str) -> bool:
    """Return whether a file is of the standard library or of an installed package."""
    return is_of_stdlib(file) or is_of_package(file)


@functools.cache
def is_of_stdlib(file: str) -> bool:
    """Return whether a file is of Python's standard library."""
    return file.startswith("<frozen ") or (
        _real_path(file).startswith(_folders("stdlib", "platstdlib")) and not is_of_package(file)
    )


@functools.cache
def is_of_package(file: str) -> bool:
    """Return whether a file is of an installed package.

    Such a file is in a folder for packages, or pip has recorded it in another folder of the import path (``--target``).
    The files of an editable installation are the user's.
    """
    path = _real_path(file)
    return (
        any(name in path.split(os.sep) for name in _PACKAGE_FOLDERS)
        or path.startswith(_folders("purelib", "platlib"))
        or any(_is_recorded(path, _real_path(os.path.abspath(folder))) for folder in sys.path if folder)
    )


@functools.cache
def _real_path(path: str) -> str:
    """Return a path without symbolic links: each part is looked up in the file system, and there are many modules."""
    return os.path.realpath(path)


@functools.cache
def _folders(*names: str) -> tuple[str, ...]:
    return tuple(os.path.join(_real_path(_PATHS[name]), "") for name in names)


def _is_recorded(file: str, folder: str) -> bool:
    """Return whether a record of pip in a folder names a file's module or outermost package."""
    if not file.startswith(os.path.join(folder, "")):
        return False
    return Path(os.path.relpath(file, folder)).parts[0] in _recorded_names(folder)


@functools.cache
def _recorded_names(folder: str) -> frozenset[str]:
    """Return the first part of each path that the records of pip in a folder name."""
    records = (record.read_text(encoding="utf-8") for record in Path(folder).glob("*.dist-info/RECORD"))
    lines = (line for record in records for line in record.splitlines())
    return frozenset(line.partition(",")[0].partition("/")[0] for line in lines)
