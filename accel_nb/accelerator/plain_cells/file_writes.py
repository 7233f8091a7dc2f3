"""Files that a plain cell writes on every rank: what one device would have written, and each file once.

Every rank of a plain cell runs the same code, so every rank opens the same paths for writing. The first rank writes to
the paths themselves. Every other rank writes to anonymous files, which are gone when the cell ends. Where such a rank
reads a path that it wrote, it reads its own version, so that a checkpoint can be written and read back in one cell
without waiting for the first rank. What it removes is hidden from it and not removed.

This holds for what Python opens, and for ``torch.save``, ``torch.load`` and safetensors. A library that writes files by
C code of its own is not redirected.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch

from accel_nb.accelerator.plain_cells.object_graph import is_written_here

_MULTIPROCESS = (
    "accel_nb", "datasets", "filelock", "huggingface_hub", "tempfile", "torch._dynamo", "torch._inductor",
    "torch.distributed", "torch.utils.cpp_extension", "triton",
)  # fmt: skip
"""Modules that write files for other processes to read, or one file for each process: these are not redirected."""

_SYSTEM = ("/dev/", "/proc/", "/sys/")
_MAX_FILES = 256
"""How many versions one rank holds, each by a descriptor; of more, the oldest are read from their paths again."""

Function = Callable[..., Any]
Make = Callable[[Function], Function]


def replacements(files: PrivateFiles | None) -> Iterator[tuple[Any, str, Make]]:
    """Yield what takes the place of functions that change files: owner, name, and what makes it of the function.

    ``files`` is None on the rank that writes to the paths themselves.
    """
    safetensors = sys.modules.get("safetensors.torch")
    if files is None:
        yield torch, "save", functools.partial(_rename_after, 1, "f")
        if safetensors is not None:
            yield safetensors, "serialize_file", functools.partial(_rename_after, 1, "filename")
        return
    yield torch, "save", functools.partial(files.write_to, 1, "f")
    yield torch, "load", functools.partial(files.read_from, 0, "f")
    if safetensors is not None:
        yield safetensors, "serialize_file", functools.partial(files.write_to, 1, "filename")
    for owner in (builtins, io):
        yield owner, "open", files.make_open
    for name in ("stat", "lstat", "access", "chmod", "utime"):
        yield os, name, files.make_status
    for name in ("remove", "unlink", "rmdir"):
        yield os, name, files.make_remove
    for name in ("rename", "replace"):
        yield os, name, files.make_rename
    yield os, "mkdir", files.make_mkdir
    yield os, "listdir", files.make_listdir
    yield os, "scandir", files.make_scandir
    yield shutil, "rmtree", files.make_rmtree


def _rename_after(position: int, name: str, plain: Function) -> Function:
    """Return a function that writes beside its path and renames the file then: who reads the path finds it whole."""

    @functools.wraps(plain)
    def save(*args: Any, **kwargs: Any) -> Any:
        given = _argument(position, name, args, kwargs)
        if not _is_path(given):
            return plain(*args, **kwargs)
        path = os.path.realpath(os.fsdecode(given))
        if os.path.exists(path) and not os.path.isfile(path):  # such as a pipe
            return plain(*args, **kwargs)
        own = f"{path}.{os.getpid()}.tmp"
        try:
            result = _call_with(plain, position, name, own, args, kwargs)
            os.replace(own, path)
        finally:
            with suppress(FileNotFoundError):
                os.remove(own)
        return result

    return save


class PrivateFiles:
    """The files that one rank wrote, the folders that it made and the paths that it removed, in its view only."""

    def __init__(self) -> None:
        self._files: dict[str, io.FileIO] = {}
        self._folders: set[str] = set()
        self._gone: set[str] = set()
        # A library that is imported while a cell runs may keep a replacement: it does nothing afterwards.
        self._is_active = False

    def begin(self) -> None:
        """Redirect what is written from now on."""
        self._is_active = True

    def discard(self) -> None:
        """Redirect nothing any more and drop all versions; one that is still open lives until it is closed."""
        self._is_active = False
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._folders.clear()
        self._gone.clear()

    def write_to(self, position: int, name: str, plain: Function) -> Function:
        """Return a function that writes to this rank's version of its path."""

        @functools.wraps(plain)
        def write(*args: Any, **kwargs: Any) -> Any:
            path = _argument(position, name, args, kwargs)
            if not self._redirects(path):
                return plain(*args, **kwargs)
            return _call_with(plain, position, name, self._prepare(path), args, kwargs)

        return write

    def read_from(self, position: int, name: str, plain: Function) -> Function:
        """Return a function that reads this rank's version of its path, if there is one."""

        @functools.wraps(plain)
        def read(*args: Any, **kwargs: Any) -> Any:
            path = _argument(position, name, args, kwargs)
            if not self._has_changes or not _is_path(path):
                return plain(*args, **kwargs)
            return _call_with(plain, position, name, self._find(path), args, kwargs)

        return read

    def make_open(self, plain: Function) -> Function:
        """Return an ``open`` of this rank's versions."""

        @functools.wraps(plain)
        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not self._is_active or not _is_path(file) or kwargs.get("opener") is not None:
                return plain(file, mode, *args, **kwargs)
            if not isinstance(mode, str) or set(mode).isdisjoint("wax+"):
                return plain(self._find(file) if self._has_changes else file, mode, *args, **kwargs)
            if not self._redirects(file):
                return plain(file, mode, *args, **kwargs)
            if "x" in mode and _full(file) in self._files:
                _raise(errno.EEXIST, file)
            keeps_content = "a" in mode or "r" in mode
            if "r" in mode and not os.path.exists(file):
                _raise(errno.ENOENT, file)
            return plain(self._prepare(file, keeps_content=keeps_content), mode.replace("x", "w"), *args, **kwargs)

        return open

    def make_status(self, plain: Function) -> Function:
        """Return a function of `os` that reads or sets what a path's inode holds, for this rank's versions."""
        reads_link, sets = plain.__name__ == "lstat", plain.__name__ in ("chmod", "utime")

        @functools.wraps(plain)
        def status(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._has_changes or not _is_path(path) or kwargs.get("dir_fd") is not None:
                return plain(path, *args, **kwargs)
            full = _full(path)
            if full in self._folders and not _exists(full):
                return None if sets else plain("/proc/self/fd", *args, **kwargs)  # a folder of this process
            place = self._find(path)
            return (_stat if reads_link and place is not path else plain)(place, *args, **kwargs)

        return status

    def make_remove(self, plain: Function) -> Function:
        """Return a function that removes this rank's version of a path, and hides the path from this rank."""

        @functools.wraps(plain)
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None or not self._redirects(path):
                plain(path, dir_fd=dir_fd)
                return
            full = _full(path)
            if full not in self._files and full not in self._folders and self._is_gone(full):
                _raise(errno.ENOENT, path)
            self._hide(full)  # the first rank removes what is there, or has done so already

        return remove

    def make_rmtree(self, plain: Function) -> Function:
        """Return an ``rmtree`` that hides a folder from this rank, with all that it wrote there."""

        @functools.wraps(plain)
        def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("dir_fd") is not None or not self._redirects(path):
                plain(path, *args, **kwargs)
                return
            self._hide(_full(path))

        # What shutil says of its own function.
        vars(rmtree).update(vars(plain))
        return rmtree

    def make_rename(self, plain: Function) -> Function:
        """Return a function that renames a path in this rank's view only."""

        @functools.wraps(plain)
        def rename(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            if src_dir_fd is not None or dst_dir_fd is not None or not self._redirects(dst):
                plain(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                return
            old, new = _full(src), _full(dst)
            if old not in self._files and old not in self._folders and self._is_gone(old):
                _raise(errno.ENOENT, src)
            if old not in self._files and old not in self._folders and os.path.isfile(old):
                self._prepare(old, keeps_content=True)
            moved = {path: new + path[len(old) :] for path in (*self._files, *self._folders) if _is_in(path, old)}
            files = {moved[path]: self._files.pop(path) for path in moved if path in self._files}
            folders = {moved[path] for path in moved if path in self._folders}
            self._hide(old)
            if moved:
                self._hide(new)
            else:  # the first rank has moved it already
                self._gone.discard(new)
            self._files |= files
            self._folders |= folders

        return rename

    def make_mkdir(self, plain: Function) -> Function:
        """Return a ``mkdir`` whose folder only this rank sees; the first rank makes it for all."""

        @functools.wraps(plain)
        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None or not self._redirects(path):
                plain(path, mode, dir_fd=dir_fd)
                return
            full = _full(path)
            if full in self._folders or full in self._files:
                _raise(errno.EEXIST, path)
            self._require_folder(full, path)
            self._folders.add(full)

        return mkdir

    def make_listdir(self, plain: Function) -> Function:
        """Return a ``listdir`` of this rank's view of a folder."""

        @functools.wraps(plain)
        def listdir(path: Any = ".") -> list[Any]:
            if not self._has_changes or not isinstance(path, str | os.PathLike):
                return plain(path)
            return [entry.name for entry in self._entries(path)]

        return listdir

    def make_scandir(self, plain: Function) -> Function:
        """Return a ``scandir`` of this rank's view of a folder."""

        @functools.wraps(plain)
        def scandir(path: Any = ".") -> Any:
            if not self._has_changes or not isinstance(path, str | os.PathLike):
                return plain(path)
            return _Scan(self._entries(path))

        return scandir

    @property
    def _has_changes(self) -> bool:
        return self._is_active and bool(self._files or self._folders or self._gone)

    def _entries(self, path: Any) -> list[Any]:
        folder, full = os.fspath(path), _full(path)
        own = [found for found in (*self._files, *self._folders) if os.path.dirname(found) == full]
        names = {os.path.basename(found) for found in own}
        public: list[Any] = []
        if full in self._folders and (self._is_gone(full) or not _exists(full)):
            pass
        elif self._is_gone(full):
            _raise(errno.ENOENT, path)
        else:
            with _scandir(path) as scan:
                public = [item for item in scan if item.name not in names and not self._is_gone(_full(item.path))]
        return [
            *public,
            *(_Entry(os.path.join(folder, os.path.basename(found)), self._files.get(found)) for found in own),
        ]

    def _redirects(self, path: Any) -> bool:
        """Whether a change of a path is one that the cell makes on every rank."""
        if not (self._is_active and _is_path(path) and _is_of_cell()):
            return False
        full = _full(path)
        if full.startswith(_SYSTEM):
            return False
        try:
            kind = _stat(full).st_mode
        except OSError:
            return True
        return stat.S_ISREG(kind) or stat.S_ISDIR(kind)

    def _prepare(self, path: Any, *, keeps_content: bool = False) -> str:
        """Return where to write this rank's version; with ``keeps_content`` it begins as what the path holds."""
        full = _full(path)
        self._require_folder(full, path)
        if full not in self._files:
            if full in self._folders or (os.path.isdir(full) and not self._is_gone(full)):
                _raise(errno.EISDIR, path)
            folder = os.path.dirname(full)
            # Beside the path, where there is room for it; a folder that only this rank has made yet holds nothing.
            file = tempfile.TemporaryFile(buffering=0, dir=folder if _access(folder, os.W_OK) else None)  # noqa: SIM115
            if keeps_content and not self._is_gone(full) and _exists(full):
                with io.FileIO(full) as source:
                    shutil.copyfileobj(source, file)
            while len(self._files) >= _MAX_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[full] = file  # pyright: ignore[reportArgumentType]
        return _place(self._files[full])

    def _find(self, path: Any) -> Any:
        """Return where this rank finds the content of a path; raises FileNotFoundError for one that it removed."""
        full = _full(path)
        file = self._files.get(full)
        if file is not None:
            return _place(file)
        if full not in self._folders and self._is_gone(full):
            _raise(errno.ENOENT, path)
        return path

    def _require_folder(self, full: str, path: Any) -> None:
        folder = os.path.dirname(full)
        if folder not in self._folders and (self._is_gone(folder) or not os.path.isdir(folder)):
            _raise(errno.ENOENT, path)

    def _hide(self, full: str) -> None:
        for path in [path for path in self._files if _is_in(path, full)]:
            self._files.pop(path).close()
        self._folders -= {path for path in self._folders if _is_in(path, full)}
        self._gone.add(full)

    def _is_gone(self, full: str) -> bool:
        return any(_is_in(full, path) for path in self._gone)


class _Entry:
    """What `os.scandir` yields, for what only this rank has written; without a file it is a folder."""

    def __init__(self, path: str, file: io.FileIO | None) -> None:
        self.path = path
        self.name = os.path.basename(path)
        self._file = file

    def __fspath__(self) -> str:
        return self.path

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a file."""
        return self._file is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a folder."""
        return self._file is None

    def is_symlink(self) -> bool:
        """Whether it is a link, which none of these is."""
        return False

    def is_junction(self) -> bool:
        """Whether it is a junction, which none of these is."""
        return False

    def inode(self) -> int:
        """Return the inode's number."""
        return self.stat().st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return what the inode holds."""
        return os.stat(self.path)


class _Scan:
    """What `os.scandir` returns."""

    def __init__(self, entries: Sequence[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _Scan:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._entries = iter(())


# The system's own, for use inside of replacements.
_access, _scandir, _stat = os.access, os.scandir, os.stat


def _exists(full: str) -> bool:
    try:
        _stat(full)
    except OSError:
        return False
    return True


def _place(file: io.FileIO) -> str:
    return f"/proc/self/fd/{file.fileno()}"


def _raise(number: int, path: Any) -> NoReturn:
    raise OSError(number, os.strerror(number), os.fsdecode(path))


def _is_path(path: Any) -> bool:
    return isinstance(path, str | bytes | os.PathLike)


def _full(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _argument(position: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _call_with(
    plain: Function, position: int, name: str, value: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a function with another value for one of its arguments."""
    if len(args) > position:
        return plain(*args[:position], value, *args[position + 1 :], **kwargs)
    return plain(*args, **{**kwargs, name: value})


def _is_of_cell() -> bool:
    """Whether the file that is changed belongs to what the cell does, seen from the nearest caller that tells."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if any(module == name or module.startswith(f"{name}.") for name in _MULTIPROCESS):
            return False
        if is_written_here(module):
            return True
        frame = frame.f_back
    return False
