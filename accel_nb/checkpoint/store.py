"""Storage of checkpoints: the interface `Store`, and `LocalStore` for local folders. Imports no torch.

A store has folders of files under one root. In a local store a checkpoint is written to a temporary folder, which is
renamed when it is complete. Object stores have no rename: there the manifest is written last, and files that no
manifest lists are ignored.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from accel_nb.checkpoint.layout import (
    LATEST,
    MANIFEST,
    parse_temporary_name,
    removed_name,
    replaced_name,
    temporary_name,
)
from accel_nb.errors import CheckpointError, CorruptCheckpoint

Buffer = bytes | memoryview

_LOCK = "lock"
_NUM_TRIES = 10
_NO_LOCK_ERRORS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of file systems that have no locks, such as Lustre by default."""


class Store(Protocol):
    """Folders of files under one root; ``folder`` and ``file`` are plain, validated names."""

    url: str
    supports_rename: bool
    """Whether folders can be renamed; otherwise file names must distinguish saves."""

    is_shared: bool
    """Whether other processes see the files."""

    def folders(self) -> list[str]:
        """Return the names of the folders, in no order; none if the root does not exist."""
        ...

    def files(self, folder: str) -> list[str]:
        """Return the names of the files in a folder."""
        ...

    def begin(self, name: str, save_id: str) -> str:
        """Create the folder to write a checkpoint to, and return its name; rank 0 only."""
        ...

    def write(self, folder: str, file: str, content: Iterable[Buffer]) -> None:
        """Write a new file; it is durable when this returns."""
        ...

    def write_atomically(self, folder: str, file: str, content: bytes) -> None:
        """Write a small file atomically."""
        ...

    def exists(self, folder: str, file: str) -> bool:
        """Return whether a file exists."""
        ...

    def read(self, folder: str, file: str, limit: int) -> bytes:
        """Return a file of at most ``limit`` bytes; raises `CorruptCheckpoint` if it is missing or not regular."""
        ...

    def size(self, folder: str, file: str) -> int:
        """Return a file's size in bytes; raises as `read`."""
        ...

    def map(self, folder: str, file: str, size: int) -> memoryview:
        """Return a file of ``size`` bytes as writable private memory; raises as `read`."""
        ...

    def commit(self, folder: str, name: str, save_id: str, manifest: bytes) -> None:
        """Complete the checkpoint atomically, replacing one of the same name; rank 0 only."""
        ...

    def write_latest(self, name: str) -> None:
        """Write the name of the newest ``step_N`` to the file ``latest``, for users and other tools."""
        ...

    def remove_files(self, folder: str, files: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""
        ...

    def discard(self, folder: str, files: Sequence[str]) -> None:
        """Remove the files of a save that is not committed."""
        ...

    def remove(self, name: str) -> None:
        """Remove a checkpoint; it is invalid from the first step on."""
        ...

    def remove_stale(self) -> None:
        """Remove the remains of saves whose process has ended; rank 0 only."""
        ...


class LocalStore:
    """A local folder, or one on a file system that all ranks mount."""

    supports_rename = True
    is_shared = True

    def __init__(self, root: str) -> None:
        self._root = Path(root).expanduser().absolute()
        self.url = str(self._root)
        self._locks: dict[str, int] = {}

    def folders(self) -> list[str]:
        """Return the folders, without links to folders."""
        try:
            with os.scandir(self._root) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self, folder: str) -> list[str]:
        """Return the names of all entries of a folder."""
        try:
            return os.listdir(self._root / folder)
        except OSError as error:
            raise CorruptCheckpoint(f"{self._root / folder}: {error.strerror}") from None

    def begin(self, name: str, save_id: str) -> str:
        """Create the temporary folder, with a lock that this process holds until the save ends.

        Raises `CheckpointError` if there is a file or a link of this name.
        """
        target, folder = self._root / name, temporary_name(name, save_id)
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            what = "link" if target.is_symlink() else "file"
            raise CheckpointError(f"{target} is a {what}, and no folder; it is not changed. Give another folder")
        for _ in range(_NUM_TRIES):
            # Renamed only once it is locked: after a kill in between, `remove_stale` can remove it.
            new = self._root / removed_name(name, uuid.uuid4().hex[:12])
            os.makedirs(new)
            lock = -1
            try:
                lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
                _lock(lock)
                os.rename(new, self._root / folder)
            except OSError as error:
                if lock >= 0:
                    os.close(lock)
                if isinstance(error, FileNotFoundError):  # another job has removed it as stale
                    continue
                raise
            self._locks[folder] = lock
            return folder
        raise CheckpointError(f"{self._root / folder} cannot be created: another process removes it repeatedly")

    def write(self, folder: str, file: str, content: Iterable[Buffer]) -> None:
        """Write and sync a file that must not exist yet."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._root / folder / file, flags, 0o644)
        try:
            for buffer in content:
                view = memoryview(buffer)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_atomically(self, folder: str, file: str, content: bytes) -> None:
        """Write a temporary file and rename it."""
        self.write(folder, f"{file}.tmp", [content])
        os.rename(self._root / folder / f"{file}.tmp", self._root / folder / file)

    def exists(self, folder: str, file: str) -> bool:
        """Return whether a file exists."""
        return (self._root / folder / file).is_file()

    def read(self, folder: str, file: str, limit: int) -> bytes:
        """Return a file's content."""
        with open(self._open(folder, file), "rb") as source:
            content = source.read(limit + 1)
        if len(content) > limit:
            raise CorruptCheckpoint(
                f"{self._root / folder / file}: it is larger than the {limit} bytes that are allowed"
            )
        return content

    def size(self, folder: str, file: str) -> int:
        """Return a file's size."""
        descriptor = self._open(folder, file)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def map(self, folder: str, file: str, size: int) -> memoryview:
        """Map a file privately."""
        descriptor = self._open(folder, file)
        try:
            found = os.fstat(descriptor).st_size
            if found != size:
                raise CorruptCheckpoint(f"{self._root / folder / file}: it has {found} bytes instead of {size}")
            if size == 0:
                return memoryview(b"")
            mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
            mapping.madvise(mmap.MADV_WILLNEED)  # all pages are read for the checksums
            return memoryview(mapping)
        finally:
            os.close(descriptor)

    def commit(self, folder: str, name: str, save_id: str, manifest: bytes) -> None:
        """Write the manifest, sync the folder and rename it."""
        self.write(folder, MANIFEST, [manifest])
        _sync_folder(self._root / folder)
        target, old = self._root / name, self._root / replaced_name(name, save_id)
        if target.exists():
            os.rename(target, old)
        os.rename(self._root / folder, target)
        _sync_folder(self._root)
        self._unlock(folder, target)
        shutil.rmtree(old, ignore_errors=True)

    def write_latest(self, name: str) -> None:
        """Write a temporary file and rename it."""
        path = self._root / f".{LATEST}.tmp"
        path.write_text(name + "\n")
        os.replace(path, self._root / LATEST)

    def remove_files(self, folder: str, files: Iterable[str]) -> None:
        """Remove files."""
        for file in files:
            (self._root / folder / file).unlink(missing_ok=True)

    def discard(self, folder: str, files: Sequence[str]) -> None:
        """Remove the temporary folder."""
        self._unlock(folder, None)
        self._remove_folder(folder)

    def remove(self, name: str) -> None:
        """Rename it first, so that after a kill `remove_stale` removes the rest."""
        self._remove_folder(name)

    def remove_stale(self) -> None:
        """Remove temporary folders whose lock is not held, replaced folders, and partly removed ones."""
        names = self.folders()
        for folder in names:
            kind = parse_temporary_name(folder)
            if kind is None:
                continue
            is_dead = kind[1] == "tmp" and folder not in self._locks and self._is_unlocked(folder)
            if is_dead or kind[1] == "gone" or (kind[1] == "old" and (self._root / kind[0] / MANIFEST).is_file()):
                with suppress(PermissionError):  # another user's, which that user's next save removes
                    self._remove_folder(folder)

    def _remove_folder(self, folder: str) -> None:
        kind = parse_temporary_name(folder)
        gone = removed_name(kind[0] if kind else folder, uuid.uuid4().hex[:12])
        try:
            os.rename(self._root / folder, self._root / gone)
        except FileNotFoundError:  # another job was faster
            return
        shutil.rmtree(self._root / gone, ignore_errors=True)

    def _is_unlocked(self, folder: str) -> bool:
        try:
            lock = os.open(self._root / folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(lock)
        return True

    def _unlock(self, folder: str, moved_to: Path | None) -> None:
        lock = self._locks.pop(folder, None)
        if moved_to is not None:
            (moved_to / _LOCK).unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)

    def _open(self, folder: str, file: str) -> int:
        path = self._root / folder / file
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            why = "it is a link, and links are not followed" if path.is_symlink() else error.strerror
            raise CorruptCheckpoint(f"{path}: {why}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CorruptCheckpoint(f"{path}: it is not a regular file")
        return descriptor


def _lock(descriptor: int) -> None:
    """Lock a file; do nothing on file systems without locks, where `LocalStore.remove_stale` removes nothing."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCK_ERRORS:
            raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
