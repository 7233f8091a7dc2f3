"""The files that rank 0 writes in a plain cell, which it records for the other ranks."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from accel_nb.accelerator.plain_cells.files.cell_files import (
    SYSTEM,
    TEMPORARY_SUFFIX,
    CellFiles,
    Function,
    absolute,
    argument,
    call_with,
    is_path,
    may_copy_database,
    writes,
)
from accel_nb.accelerator.plain_cells.files.changed_paths import MAX_KEPT
from accel_nb.accelerator.plain_cells.files.library_files import FileFunction

_T = TypeVar("_T")


class SharedFiles(CellFiles):
    """The files of the rank that writes to the paths themselves. It records the changed ones for the other ranks."""

    def make_renaming_writer(self, position: int, name: str, original: Function) -> Function:
        """Return a function that writes a temporary file and renames it, so that other ranks read complete files."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            target = argument(position, name, args, kwargs)
            if not is_path(target):
                return original(*args, **kwargs)
            path = os.path.realpath(os.fsdecode(target))
            if os.path.exists(path) and not os.path.isfile(path):  # such as a pipe
                return original(*args, **kwargs)
            temporary = f"{path}.{os.getpid()}{TEMPORARY_SUFFIX}"
            try:
                result = call_with(original, position, name, temporary, args, kwargs)
                if os.path.exists(temporary):  # the profiler logs that it cannot write, and raises nothing
                    self._record(target)  # as the other ranks look it up, which follow no links
                    _replace(temporary, path)
            finally:
                with suppress(FileNotFoundError):
                    _remove(temporary)
            return result

        return save

    def make_library_function(self, function: FileFunction, original: Function) -> Function:
        """Return a function of a library that records a file that it creates or changes."""
        if function.use == "open":
            return self.make_open(original)
        if function.use == "read":
            return original

        @functools.wraps(original)
        def write(*args: Any, **kwargs: Any) -> Any:
            self._record(argument(function.position, function.argument, args, kwargs), is_in_place=True)
            return original(*args, **kwargs)

        return write

    def make_connect(self, original: Function) -> Function:
        """Return a ``connect`` that records the file of a database, which the cell may change."""

        @functools.wraps(original)
        def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
            if may_copy_database(database) and not kwargs.get("uri"):
                self._record(database, is_in_place=True)
            return original(database, *args, **kwargs)

        return connect

    def make_hdf5_init(self, original: Function) -> Function:
        """Return an ``__init__`` of h5py's file that records a file that it creates or changes."""

        @functools.wraps(original)
        def init(file: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
            if mode != "r":
                self._record(name, is_in_place=True)
            original(file, name, mode, *args, **kwargs)

        return init

    def make_open(self, original: Function) -> Function:
        """Return an ``open`` that records a file that it creates or changes."""

        @functools.wraps(original)
        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            paths = [file] if isinstance(mode, str) and not set(mode).isdisjoint("wax+") else []
            return self._call(paths, lambda: original(file, mode, *args, **kwargs), is_in_place=True)

        return open

    def make_os_open(self, original: Function) -> Function:
        """Return an ``os.open`` that records a file that it creates or changes."""

        @functools.wraps(original)
        def open(path: Any, flags: int, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> int:
            paths = [path] if dir_fd is None and writes(flags) else []
            return self._call(paths, lambda: original(path, flags, *args, dir_fd=dir_fd, **kwargs), is_in_place=True)

        return open

    def make_truncate(self, original: Function) -> Function:
        """Return an ``os.truncate`` that records the file."""

        @functools.wraps(original)
        def truncate(path: Any, length: int) -> None:
            self._call([path], lambda: original(path, length), is_in_place=True)

        return truncate

    def make_link(self, original: Function) -> Function:
        """Return a function that makes a link, which records its path."""

        @functools.wraps(original)
        def link(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
            has_folder = any(kwargs.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"))
            self._call([] if has_folder else [dst], lambda: original(src, dst, *args, **kwargs))

        return link

    def make_mkdir(self, original: Function) -> Function:
        """Return a ``mkdir`` that records a folder that it creates."""

        @functools.wraps(original)
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            paths = [path] if kwargs.get("dir_fd") is None else []
            self._call(paths, lambda: original(path, *args, **kwargs))

        return mkdir

    def make_rename(self, original: Function) -> Function:
        """Return a ``rename`` that records both paths."""

        @functools.wraps(original)
        def rename(src: Any, dst: Any, **kwargs: Any) -> None:
            self._call([] if kwargs else [src, dst], lambda: original(src, dst, **kwargs))

        return rename

    def make_remove(self, original: Function) -> Function:
        """Return a function that records a path before it removes it."""

        @functools.wraps(original)
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            self._call([path] if dir_fd is None else [], lambda: original(path, dir_fd=dir_fd))

        return remove

    def make_rmtree(self, original: Function) -> Function:
        """Return an ``rmtree`` that records the contents of a folder, and then the folder itself."""

        @functools.wraps(original)
        def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("dir_fd") is None and is_path(path):
                for found in itertools.islice(_paths_in(os.fsdecode(path)), MAX_KEPT - 1):
                    self._record(found)
                self._record(path)
            original(path, *args, **kwargs)

        # The attributes of shutil's function, such as avoids_symlink_attacks.
        vars(rmtree).update(vars(original))
        return rmtree

    def _call(self, paths: Iterable[Any], function: Callable[[], _T], *, is_in_place: bool = False) -> _T:
        """Record the paths that a function is about to change, all of them or none, and call it."""
        recorded = [path for path in paths if self._record(path, is_in_place=is_in_place)]
        try:
            return function()
        except BaseException:
            for path in recorded:
                if self.changed is not None:
                    self.changed.cancel(absolute(path))
            raise

    def _record(self, path: Any, *, is_in_place: bool = False) -> bool:
        """Record a path that the cell's code is about to change; return whether it was not recorded before."""
        if not self._is_active or self.changed is None or not is_path(path):
            return False
        full = absolute(path)
        if not full.startswith(SYSTEM) and self.changed.needs_record(full) and self._is_called_by_cell():
            return self.changed.record(full, is_in_place=is_in_place)
        return False


def _paths_in(path: str) -> Iterator[str]:
    """Yield the files and folders in a folder, each after those in it."""
    for folder, folders, names in os.walk(path, topdown=False):
        yield from (os.path.join(folder, name) for name in (*names, *folders))


_remove, _replace = os.remove, os.replace  # the original functions, for use inside of replacements
