"""The file functions that are replaced while a plain cell runs, each with the factory of its replacement."""

from __future__ import annotations

import builtins
import bz2
import functools
import glob
import io
import os
import pathlib
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from sqlite3 import dbapi2
from typing import Any

import torch

from accel_nb.accelerator.plain_cells.files.cell_files import Function
from accel_nb.accelerator.plain_cells.files.file_writes import SET_STATUS, PrivateFiles
from accel_nb.accelerator.plain_cells.files.library_files import SAFETENSORS, imported_functions
from accel_nb.accelerator.plain_cells.files.shared_files import SharedFiles

_CLASSES_WITH_OS_FUNCTIONS = [
    found
    for module, name in ((pathlib, "_NormalAccessor"), (glob, "_StringGlobber"))
    if (found := getattr(module, name, None)) is not None
]
"""Classes that hold functions of `os` as attributes: `pathlib` calls these in Python 3.10, and from 3.13 on."""

_MODULES_WITH_OPEN = ((bz2, "_builtin_open"), (tarfile, "bltn_open"))
"""Modules of Python that have ``open`` as an attribute."""
_READ_STATUS = ("stat", "lstat", "access", "listxattr", "getxattr")
_SCRIPTED: Any = torch.jit.RecursiveScriptModule  # pyright: ignore[reportPrivateImportUsage]
_PROFILE: Any = torch.autograd.profiler.profile

Make = Callable[[Function], Function]


def replacements(files: SharedFiles | PrivateFiles) -> Iterator[tuple[Any, str, Make]]:
    """Yield the functions to patch: their owner, their name, and a function that returns the replacement."""
    yield threading.Thread, "start", files.make_start
    held = [(module, name) for module, name in _MODULES_WITH_OPEN if getattr(module, name, None) is builtins.open]
    yield from ((module, name, files.make_open) for module, name in held)
    for name, make in (("open", files.make_os_open), ("truncate", files.make_truncate)):
        yield os, name, make
    openers = getattr(sys.modules.get("numpy.lib._datasource"), "_FileOpeners", None)
    if openers is not None:  # NumPy holds the `open` of its first use
        yield openers, "__getitem__", _with_current_open
    for module in (sqlite3, dbapi2):
        yield module, "connect", files.make_connect
    yield from library_replacements(files)
    if isinstance(files, SharedFiles):
        yield torch, "save", functools.partial(files.make_renaming_writer, 1, "f")
        yield _SCRIPTED, "save", functools.partial(files.make_renaming_writer, 1, "f")
        yield _PROFILE, "export_chrome_trace", functools.partial(files.make_renaming_writer, 1, "path")
        yield builtins, "open", files.make_open
        for owner, name, make in (
            (io, "open", files.make_open),
            (os, "mkdir", files.make_mkdir),
            (os, "rename", files.make_rename),
            (os, "replace", files.make_rename),
            (os, "remove", files.make_remove),
            (os, "unlink", files.make_remove),
            (os, "rmdir", files.make_remove),
            (os, "link", files.make_link),
            (os, "symlink", files.make_link),
        ):
            yield from _with_holders(owner, name, make)
        yield shutil, "rmtree", files.make_rmtree
        return
    yield torch, "save", functools.partial(files.make_writer, 1, "f")
    yield torch, "load", functools.partial(files.make_reader, 0, "f")
    yield _SCRIPTED, "save", functools.partial(files.make_writer, 1, "f")
    yield torch.jit, "load", functools.partial(files.make_reader, 0, "f")
    yield _PROFILE, "export_chrome_trace", functools.partial(files.make_copying_writer, 1, "path")
    yield builtins, "open", files.make_open
    for owner, name, make in _replacements_of_os(files):
        yield from _with_holders(owner, name, make)
    yield shutil, "rmtree", files.make_rmtree
    for name in ("mkdtemp", "mkstemp", "NamedTemporaryFile"):
        yield tempfile, name, files.make_temporary


def _with_current_open(original: Function) -> Function:
    """Return a ``__getitem__`` of NumPy's functions that open a file, by its extension."""

    @functools.wraps(original)
    def get(openers: Any, extension: str | None) -> Function:
        return io.open if extension is None else original(openers, extension)

    return get


def library_replacements(files: SharedFiles | PrivateFiles) -> Iterator[tuple[Any, str, Make]]:
    """Yield the functions to patch of the `LIBRARIES` that this process has imported, as `replacements` does."""
    hdf5 = sys.modules.get("h5py")
    if hdf5 is not None and hasattr(hdf5, "File"):  # it may still be importing its own modules
        yield hdf5.File, "__init__", files.make_hdf5_init
    for function in imported_functions():
        yield function.owner(), function.own_name, functools.partial(files.make_library_function, function)
    save = files.make_renaming_writer if isinstance(files, SharedFiles) else files.make_copying_writer
    for module in filter(None, map(sys.modules.get, SAFETENSORS)):
        if hasattr(module, "serialize_file"):
            yield module, "serialize_file", functools.partial(save, 1, "filename")


def _with_holders(owner: Any, name: str, make: Make) -> Iterator[tuple[Any, str, Make]]:
    holders = [holder for holder in _CLASSES_WITH_OS_FUNCTIONS if getattr(holder, name, None) is getattr(owner, name)]
    yield owner, name, make
    for holder in holders:
        yield holder, name, functools.partial(_make_static, make)


def _replacements_of_os(files: PrivateFiles) -> Iterator[tuple[Any, str, Make]]:
    yield io, "open", files.make_open
    for name in (*_READ_STATUS, *SET_STATUS):
        yield os, name, files.make_status
    yield os, "link", files.make_link
    yield os, "symlink", files.make_symlink
    yield os, "readlink", files.make_readlink
    for name in ("remove", "unlink", "rmdir"):
        yield os, name, files.make_remove
    for name in ("rename", "replace"):
        yield os, name, files.make_rename
    yield os, "mkdir", files.make_mkdir
    yield os, "chdir", files.make_chdir
    yield os, "listdir", files.make_listdir
    yield os, "scandir", files.make_scandir


def _make_static(make: Make, original: Function) -> Any:
    return staticmethod(make(original))
