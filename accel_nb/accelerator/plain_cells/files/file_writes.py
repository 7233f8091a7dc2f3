"""Redirection of the files that a plain cell writes on every rank, so that each file is written once.

All ranks run the code of a plain cell, so they all open the same paths for writing. Rank 0 writes to the paths
themselves. Every other rank writes to anonymous temporary files, its *versions* of the paths, which are deleted when
the cell ends. Where such a rank reads a path that it wrote, it reads its own version, so that a checkpoint can be
written and read back in one cell without waiting for rank 0. A path that such a rank removes is hidden from this rank,
and not removed. A path that rank 0 has changed is as before for a rank that has not reached that change yet
(`ChangedPaths`).

Python's functions for files, those of torch, safetensors and h5py, databases of ``sqlite3`` and the functions of
`library_files` are redirected. Other files that a library writes in C code are not.
"""

from __future__ import annotations

import errno
import functools
import inspect
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from accel_nb.accelerator.plain_cells.files.cell_files import (
    TEMPORARY_SUFFIX,
    Function,
    absolute,
    argument,
    call_with,
    is_path,
    may_copy_database,
    writes,
)
from accel_nb.accelerator.plain_cells.files.library_files import FileFunction
from accel_nb.accelerator.plain_cells.files.path_view import (
    UNKNOWN,
    PathView,
    descriptor_path,
    exists,
    exists_as_folder,
    is_in,
    original_access,
    original_stat,
    raise_os_error,
)
from accel_nb.runtime.process.temporary_files import make_temporary_folder

SET_STATUS = ("chmod", "utime", "chown", "setxattr", "removexattr")
"""The functions of `os` that set a path's status."""
_MAX_FILES = 256
"""Maximum number of versions of one rank, each with a file descriptor. Beyond it the oldest ones are deleted."""

_POLL_S = 0.002
_MAX_WAIT_S = 10.0
"""How long a rank waits for a folder of rank 0, which may be on another machine."""


class PrivateFiles(PathView):
    """Replacements of file functions; the changes of paths that they make are visible to this rank only."""

    def __init__(self) -> None:
        super().__init__()
        # Processes that this rank starts use its folder too: only the end of a rank removes one.
        self._pid = os.getpid()
        # By path, the version that is a database or an HDF5 file, and its path, which these libraries need.
        self._databases: dict[str, tuple[io.FileIO, str]] = {}

    def discard(self) -> None:
        """Stop redirecting and delete all versions; one that is still open exists until it is closed."""
        super().discard()
        for _, version_path in self._databases.values():
            shutil.rmtree(os.path.dirname(version_path), ignore_errors=True)
        self._databases.clear()
        self.clear_paths()

    def signatures(self) -> dict[str, Any]:
        """Return a signature (inode, size, time) of the file at each path that this rank has changed."""
        return {path: _signature(path) for path in {*self._files, *self._folders, *self._removed}}

    def refresh(self, before: dict[str, Any]) -> None:
        """Update the versions of the paths whose signature has changed since ``before``, by a command of rank 0."""
        for path, known in before.items():
            if (now := _signature(path)) == known:
                continue
            if now is None:
                self._folders.discard(path)
                if path in self._files:
                    self._files.pop(path).close()
                continue
            self._removed -= {hidden for hidden in self._removed if is_in(path, hidden)}
            if path in self._files:
                with io.FileIO(path) as source:
                    file = self._files[path]
                    file.seek(0)
                    file.truncate()
                    shutil.copyfileobj(source, file)

    def make_writer(self, position: int, name: str, original: Function) -> Function:
        """Return a function that writes to this rank's version of its path."""

        @functools.wraps(original)
        def write(*args: Any, **kwargs: Any) -> Any:
            path = argument(position, name, args, kwargs)
            if not self._redirects(path):
                return original(*args, **kwargs)
            return call_with(original, position, name, self._prepare(path), args, kwargs)

        return write

    def make_copying_writer(self, position: int, name: str, original: Function) -> Function:
        """Return a function that writes a named temporary file and copies it to this rank's version of its path."""

        @functools.wraps(original)
        def write(*args: Any, **kwargs: Any) -> Any:
            path = argument(position, name, args, kwargs)
            if not (self._redirects(path) and os.path.isdir(os.path.dirname(absolute(path)))):
                return original(*args, **kwargs)
            version = self._prepare(path)
            with tempfile.TemporaryDirectory(dir=make_temporary_folder(self._pid)) as folder:
                named = os.path.join(folder, os.path.basename(absolute(path)))
                result = call_with(original, position, name, named, args, kwargs)
                if os.path.exists(named):  # some libraries return that they cannot write, and raise nothing
                    shutil.copyfile(named, version)
            return result

        return write

    def make_library_function(self, function: FileFunction, original: Function) -> Function:
        """Return a function of a library that reads or writes this rank's version of its path."""
        if function.use == "open":
            return self.make_open(original)
        make = {"read": self.make_reader, "write": self.make_writer, "write by name": self.make_copying_writer}[
            function.use
        ]
        return make(function.position, function.argument, original)

    def make_connect(self, original: Function) -> Function:
        """Return a ``connect`` that opens this rank's version of a database."""

        @functools.wraps(original)
        def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
            if not may_copy_database(database) or kwargs.get("uri") or not self._redirects(database):
                return original(database, *args, **kwargs)
            return original(self._prepare_database(database), *args, **kwargs)

        return connect

    def make_hdf5_init(self, original: Function) -> Function:
        """Return an ``__init__`` of h5py's file that opens this rank's version of its path."""

        @functools.wraps(original)
        def init(file: Any, name: Any, mode: str = "r", driver: Any = None, **kwargs: Any) -> None:
            if driver is not None or not is_path(name):
                original(file, name, mode, driver, **kwargs)
            elif mode == "r" or not self._redirects(name):
                original(file, self._find(name) if self._has_changes else name, mode, driver, **kwargs)
            elif os.path.exists(name):
                version_path = self._prepare_database(name)
                original(file, version_path, mode, driver, **kwargs)
                self._set_database(self._absolute(name), version_path)
            elif mode == "r+":
                raise_os_error(errno.ENOENT, name)
            else:
                version_path = self._prepare_database(name)
                _remove(version_path)  # the library creates the file itself
                try:
                    original(file, version_path, mode, driver, **kwargs)
                except BaseException:
                    self._forget_database(self._absolute(name))
                    raise
                self._set_database(self._absolute(name), version_path)

        return init

    def _prepare_database(self, path: Any) -> str:
        """Return the path of this rank's version of a database. What the version held so far is kept."""
        full = self._absolute(path)
        file, version_path = self._databases.get(full, (None, ""))
        if file is None or file is not self._files.get(full):
            version_path = os.path.join(tempfile.mkdtemp(dir=make_temporary_folder(self._pid)), os.path.basename(full))
            shutil.copyfile(self._prepare(path, keeps_content=True), version_path)
            self._set_database(full, version_path)
        return version_path

    def _set_database(self, full: str, version_path: str) -> None:
        self._files.pop(full).close()
        self._files[full] = file = io.FileIO(version_path, "r+")
        self._databases[full] = file, version_path

    def _forget_database(self, full: str) -> None:
        self._files.pop(full).close()
        _, version_path = self._databases.pop(full)
        shutil.rmtree(os.path.dirname(version_path), ignore_errors=True)

    def make_reader(self, position: int, name: str, original: Function) -> Function:
        """Return a function that reads this rank's version of its path, if there is one."""

        @functools.wraps(original)
        def read(*args: Any, **kwargs: Any) -> Any:
            path = argument(position, name, args, kwargs)
            if not self._has_changes or not is_path(path):
                return original(*args, **kwargs)
            return call_with(original, position, name, self._find(path), args, kwargs)

        return read

    def make_open(self, original: Function) -> Function:
        """Return an ``open`` that opens this rank's versions."""

        @functools.wraps(original)
        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not self._is_active or not is_path(file) or kwargs.get("opener") is not None:
                return original(file, mode, *args, **kwargs)
            if not isinstance(mode, str) or set(mode).isdisjoint("wax+"):
                actual = self._find(file) if self._has_changes else file
                try:
                    opened = original(actual, mode, *args, **kwargs)
                except FileNotFoundError:
                    if (now := self._find(file)) == actual:
                        raise
                    opened = original(now, mode, *args, **kwargs)  # rank 0 has removed it just now
                if self._is_ahead(self._absolute(file)):  # rank 0 has created it just now
                    opened.close()
                    raise_os_error(errno.ENOENT, file)
                return opened if actual is file else _with_name(opened, file)
            if not self._redirects(file):
                return original(file, mode, *args, **kwargs)
            if "x" in mode:
                self._check_creation(self._absolute(file, follows_link=False), file)
            keeps_content = "a" in mode or "r" in mode
            if "r" in mode and not os.path.exists(file):
                raise_os_error(errno.ENOENT, file)
            version = self._prepare(file, keeps_content=keeps_content)
            return _with_name(original(version, mode.replace("x", "w"), *args, **kwargs), file)

        return open

    def make_os_open(self, original: Function) -> Function:
        """Return an ``os.open`` that opens this rank's versions."""

        @functools.wraps(original)
        def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            is_file = dir_fd is None and is_path(path) and not flags & (os.O_DIRECTORY | getattr(os, "O_PATH", 0))
            if not (self._is_active and is_file) or (writes(flags) and not self._redirects(path)):
                return original(path, flags, mode, dir_fd=dir_fd)
            if not writes(flags):
                return original(self._find(path) if self._has_changes else path, flags, mode)
            if flags & os.O_CREAT and flags & os.O_EXCL:
                self._check_creation(self._absolute(path, follows_link=False), path)
            elif not (flags & os.O_CREAT or os.path.exists(path)):
                raise_os_error(errno.ENOENT, path)
            version = self._prepare(path, keeps_content=not flags & os.O_TRUNC)
            return original(version, flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW), mode)

        return open

    def make_truncate(self, original: Function) -> Function:
        """Return an ``os.truncate`` of this rank's version."""

        @functools.wraps(original)
        def truncate(path: Any, length: int) -> None:
            if not self._redirects(path):
                original(path, length)
                return
            if not os.path.exists(path):
                raise_os_error(errno.ENOENT, path)
            original(self._prepare(path, keeps_content=True), length)

        return truncate

    def make_link(self, original: Function) -> Function:
        """Return a ``link`` for this rank only: a link to a version is another name of it, to another file a copy."""

        @functools.wraps(original)
        def link(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
            if args or kwargs or not self._redirects(dst):
                original(src, dst, *args, **kwargs)
                return
            old, new = self._absolute(src, follows_link=False), self._absolute(dst, follows_link=False)
            if self._mode(old) is None:
                raise_os_error(errno.ENOENT, src, dst)
            self._check_creation(new, dst)
            if (file := self._files.get(old)) is None:
                with io.FileIO(self._find(src)) as source, io.FileIO(self._prepare(dst), "r+") as copy:
                    shutil.copyfileobj(source, copy)
            else:
                self._prepare(dst)
                self._files.pop(new).close()
                self._files[new] = io.FileIO(os.dup(file.fileno()), "r+")

        return link

    def make_symlink(self, original: Function) -> Function:
        """Return a ``symlink`` whose link exists for this rank only."""

        @functools.wraps(original)
        def symlink(src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None or not self._redirects(dst):
                original(src, dst, target_is_directory, dir_fd=dir_fd)
                return
            full = self._absolute(dst, follows_link=False)
            if self._mode(full) not in (None, UNKNOWN):
                raise_os_error(errno.EEXIST, src, dst)
            self._check_folder(full, src, dst)
            self._links[full] = os.fsdecode(src)
            if self.changed is not None:
                self.changed.use_present(full)

        return symlink

    def make_readlink(self, original: Function) -> Function:
        """Return a ``readlink`` that reads this rank's links."""

        @functools.wraps(original)
        def readlink(path: Any, *, dir_fd: int | None = None) -> Any:
            if dir_fd is not None or not (self._has_changes and is_path(path)):
                return original(path, dir_fd=dir_fd)
            full = self._absolute(path, follows_link=False)
            if (target := self._links.get(full)) is not None:
                return os.fsencode(target) if isinstance(path, bytes) else target
            if full in self._files or full in self._folders:
                raise_os_error(errno.EINVAL, path)
            return original(self._find(full))

        return readlink

    def make_status(self, original: Function) -> Function:
        """Return a function of `os` that reads or sets a path's status, such as ``stat``, for this rank's versions."""
        reads_link, sets = original.__name__ == "lstat", original.__name__ in SET_STATUS

        @functools.wraps(original)
        def status(path: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self._has_changes or not is_path(path) or kwargs.get("dir_fd") is not None:
                return original(path, *args, **kwargs)
            is_of_link = reads_link or not kwargs.get("follow_symlinks", True)
            full = self._absolute(path, follows_link=not is_of_link)
            if full in self._links:  # of any existing link: this rank's exists in memory only
                return None if sets else original("/proc/self/exe", *args, **kwargs)
            if full in self._folders and not exists_as_folder(full):
                # Of any existing folder: this rank's exists in memory only.
                return None if sets else original("/proc/self/fd", *args, **kwargs)
            found = self._find(path)
            result = (original_stat if reads_link and found is not path else original)(found, *args, **kwargs)
            if self._is_ahead(full):  # rank 0 has created it just now
                raise_os_error(errno.ENOENT, path)
            return result

        return status

    def make_remove(self, original: Function) -> Function:
        """Return a function that removes this rank's version of a path, and hides the path from this rank."""

        @functools.wraps(original)
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None or not self._redirects(path):
                original(path, dir_fd=dir_fd)
                return
            full = self._absolute(path, follows_link=False)
            self._check_removal(full, path, of_folder=original.__name__ == "rmdir")
            self._hide(full)  # rank 0 removes the path itself

        return remove

    def make_rmtree(self, original: Function) -> Function:
        """Return an ``rmtree`` that hides a folder from this rank, and deletes the versions in it."""

        @functools.wraps(original)
        def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("dir_fd") is not None or not self._redirects(path):
                original(path, *args, **kwargs)
                return
            full = self._absolute(path, follows_link=False)
            try:
                self._check_tree(full, path)
            except OSError as error:
                _report_failure(error, path, *args, **kwargs)
            else:
                self._hide(full)

        # The attributes of shutil's function, such as avoids_symlink_attacks.
        vars(rmtree).update(vars(original))
        return rmtree

    def make_temporary(self, original: Function) -> Function:
        """Return a function of `tempfile` that records the path, whose writes are not redirected.

        Files and folders in the default folder are made in a subfolder of it, which is removed when this process ends.
        """
        position = list(inspect.signature(original).parameters).index("dir")

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            if self._is_active and argument(position, "dir", args, kwargs) is None:
                made = call_with(original, position, "dir", make_temporary_folder(self._pid), args, kwargs)
            else:
                made = original(*args, **kwargs)
            path = made[1] if isinstance(made, tuple) else getattr(made, "name", made)
            if self._is_active and is_path(path):
                self._temporary.add(absolute(path))
            return made

        return make

    def make_rename(self, original: Function) -> Function:
        """Return a function that renames a path for this rank only."""

        @functools.wraps(original)
        def rename(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            if src_dir_fd is not None or dst_dir_fd is not None or not self._redirects(dst):
                original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                return
            old, new = self._absolute(src, follows_link=False), self._absolute(dst, follows_link=False)
            self._check_renaming(old, new, src, dst)
            if all(old not in paths for paths in (self._files, self._folders, self._links)) and os.path.isfile(old):
                self._prepare(old, keeps_content=True)
            own = (*self._files, *self._folders, *self._links)
            moved = {path: new + path[len(old) :] for path in own if is_in(path, old)}
            links = {moved[path]: self._links.pop(path) for path in moved if path in self._links}
            files = {moved[path]: self._files.pop(path) for path in moved if path in self._files}
            folders = {moved[path] for path in moved if path in self._folders}
            removed = {new + path[len(old) :] for path in self._removed if is_in(path, old) and path != old}
            if new != old:
                for path in self._renamed_in(new):  # it is replaced
                    del self._renamed[path]
            self._rename_folders(old, new)
            is_on_disk = new in self._renamed
            kept = {path: self._renamed.pop(path) for path in self._renamed_in(new)}
            self._hide(old)
            if moved:
                self._hide(new)
            if is_on_disk or not moved:  # else rank 0 has renamed it already
                self._removed.discard(new)
            self._removed |= removed
            self._renamed |= kept
            self._files |= files
            self._links |= links
            self._add_folders(folders)
            if self.changed is not None:
                self.changed.use_present(new)

        return rename

    def make_mkdir(self, original: Function) -> Function:
        """Return a ``mkdir`` whose folder exists for this rank only; rank 0 makes the real one."""

        @functools.wraps(original)
        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None or not self._redirects(path):
                original(path, mode, dir_fd=dir_fd)
                return
            full = self._absolute(path, follows_link=False)
            self._check_creation(full, path)
            self._add_folders([full])

        return mkdir

    def make_chdir(self, original: Function) -> Function:
        """Return a ``chdir`` that waits for rank 0 to make a folder that this rank has made, too."""

        @functools.wraps(original)
        def chdir(path: Any) -> None:
            if not isinstance(path, str | os.PathLike):
                original(path)
                return
            full = self._absolute(path)
            if full in self._folders or self._place(full) is not None:
                deadline = time.monotonic() + _MAX_WAIT_S
                while not exists(full) and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
            original(path if full == absolute(path) else full)

        return chdir

    def make_listdir(self, original: Function) -> Function:
        """Return a ``listdir`` that includes this rank's changes of a folder."""

        @functools.wraps(original)
        def listdir(path: Any = ".") -> list[Any]:
            if not self._is_active or not isinstance(path, str | os.PathLike):
                return original(path)
            if not self._has_changes:
                return [name for name in original(path) if not name.endswith(TEMPORARY_SUFFIX)]
            return [entry.name for entry in self._list_entries(path)]

        return listdir

    def make_scandir(self, original: Function) -> Function:
        """Return a ``scandir`` that includes this rank's changes of a folder."""

        @functools.wraps(original)
        def scandir(path: Any = ".") -> Any:
            if not self._is_active or not isinstance(path, str | os.PathLike):
                return original(path)
            if not self._has_changes:
                with original(path) as scan:
                    return _Scan([entry for entry in scan if not entry.name.endswith(TEMPORARY_SUFFIX)])
            return _Scan(self._list_entries(path))

        return scandir

    def _prepare(self, path: Any, *, keeps_content: bool = False) -> str:
        """Return the path of this rank's version, for writing; with ``keeps_content`` a new version is a copy."""
        full = self._absolute(path)
        self._check_write(full, path)
        if full not in self._files:
            folder = os.path.dirname(full)
            # On the path's file system, which has room for it, if the folder is writable.
            file = tempfile.TemporaryFile(buffering=0, dir=folder if original_access(folder, os.W_OK) else None)  # noqa: SIM115
            if keeps_content:
                self._copy_content(full, file)
            while len(self._files) >= _MAX_FILES:
                dropped = next(iter(self._files))
                self._files.pop(dropped).close()
                self._dropped.add(dropped)
                self._removed.discard(dropped)
            if self.changed is not None:
                self.changed.use_present(full)
            self._files[full] = file  # pyright: ignore[reportArgumentType]
        return descriptor_path(self._files[full])

    def _copy_content(self, full: str, file: BinaryIO) -> None:
        """Copy the file that this rank finds at a path into ``file``; again if rank 0 changes the path meanwhile."""
        while True:
            actual = self._find_existing(full)
            file.seek(0)
            file.truncate()
            if actual is not None:
                with suppress(FileNotFoundError), io.FileIO(actual) as source:
                    shutil.copyfileobj(source, file)
            if self._find_existing(full) == actual:
                return

    def _find_existing(self, full: str) -> str | None:
        try:
            return self._find(full)
        except FileNotFoundError:
            return None


class _Scan:
    """Iterator and context manager, as `os.scandir` returns it."""

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


def _with_name(opened: Any, path: Any) -> Any:
    """Return an opened file with the name by which code has opened it, instead of the version's name."""
    raw = opened
    for name in ("buffer", "raw"):
        raw = getattr(raw, name, raw)
    if isinstance(raw, io.FileIO):
        raw.name = path  # pyright: ignore[reportAttributeAccessIssue]
    return opened


_remove = os.remove  # the original function, for use inside of replacements


def _signature(full: str) -> tuple[int, int, int] | None:
    try:
        status = original_stat(full)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _report_failure(
    error: OSError,
    path: Any,
    ignore_errors: bool = False,
    onerror: Callable[..., object] | None = None,
    *,
    onexc: Callable[..., object] | None = None,
    **_: Any,
) -> None:
    """Raise the error of a `shutil.rmtree`, or report it as the arguments of that call say."""
    if ignore_errors:
        return
    if onexc is not None:
        onexc(os.lstat, path, error)
    elif onerror is not None:
        onerror(os.lstat, path, (type(error), error, error.__traceback__))
    else:
        raise error
