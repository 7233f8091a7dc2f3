"""Detection of the file operations of a plain cell, by its code and by threads that it has started."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accel_nb.accelerator.plain_cells.files.changed_paths import MAX_COPIED_BYTES, ChangedPaths
from accel_nb.runtime.process.user_code import is_user_module

_MULTIPROCESS = (
    "accel_nb", "datasets", "filelock", "huggingface_hub", "tempfile", "torch._dynamo", "torch._inductor",
    "torch.distributed", "torch.utils.cpp_extension", "triton",
)  # fmt: skip
"""Modules that write files for other processes to read, or one file for each process: these are not redirected."""

_REPLACING = frozenset(f"{__package__}.{name}" for name in ("cell_files", "file_writes", "path_view", "shared_files"))
"""The modules with replacements of file functions: when the caller is determined, their frames are skipped."""
SYSTEM = ("/dev/", "/proc/", "/sys/")
TEMPORARY_SUFFIX = ".accel_nb_tmp"
"""Suffix of files that rank 0 writes and then renames; other ranks do not list them."""
Function = Callable[..., Any]


class CellFiles:
    """The files of the cell that runs, and whether code is the cell's."""

    def __init__(self) -> None:
        self.changed: ChangedPaths | None = None
        # The threads that the cell's code has started, also through a library: their files are the cell's.
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._writes_for_cell = False
        # A library that is imported while a cell runs may keep a reference to a replacement, which must call the
        # original function once the cell has ended.
        self._is_active = False

    def begin(self, changed: ChangedPaths | None) -> None:
        """Redirect or record files from now on."""
        self._is_active, self.changed = True, changed

    def discard(self) -> None:
        """Stop redirecting or recording files."""
        self._is_active = False

    @contextmanager
    def writing_for_cell(self) -> Iterator[None]:
        """Treat files that this package writes while the block runs as written by the cell's code."""
        self._writes_for_cell = True
        try:
            yield
        finally:
            self._writes_for_cell = False

    def make_start(self, original: Function) -> Function:
        """Return a ``Thread.start`` that records the threads that the cell's code starts."""

        @functools.wraps(original)
        def start(thread: threading.Thread) -> None:
            if self._is_active and self._is_called_by_cell():
                self._threads.add(thread)
            original(thread)

        return start

    def _is_called_by_cell(self) -> bool:
        """Return whether the user's code, or a thread of it, is nearer on the stack than any of `_MULTIPROCESS`."""
        if self._writes_for_cell:
            return True
        frame = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in _REPLACING:
            frame = frame.f_back
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if any(module == name or module.startswith(f"{name}.") for name in _MULTIPROCESS):
                return False
            if is_user_module(module):
                return True
            frame = frame.f_back
        return threading.current_thread() in self._threads


def is_path(path: Any) -> bool:
    """Return whether a function for files takes it as a path."""
    return isinstance(path, str | bytes | os.PathLike)


def may_copy_database(path: Any) -> bool:
    """Return whether ranks may have copies of the database at a path: it is small, or does not exist yet.

    Not of a database in memory, and not in a child process such as a DataLoader's, which reads the database itself.
    """
    if not is_path(path) or os.fsdecode(path) in ("", ":memory:") or multiprocessing.parent_process() is not None:
        return False
    try:
        return os.stat(path).st_size <= MAX_COPIED_BYTES
    except OSError:
        return True


def absolute(path: Any) -> str:
    """Return a path as an absolute one, as text."""
    return os.path.abspath(os.fsdecode(path))


def argument(position: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return one of the arguments of a call; None if it is not given."""
    return args[position] if len(args) > position else kwargs.get(name)


def writes(flags: int) -> bool:
    """Return whether `os.open` may change a file with these flags."""
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))


def call_with(
    original: Function, position: int, name: str, value: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a function with another value for one of its arguments."""
    if len(args) > position:
        return original(*args[:position], value, *args[position + 1 :], **kwargs)
    return original(*args, **{**kwargs, name: value})
