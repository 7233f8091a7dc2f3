"""Paths that rank 0 changes in a plain cell: a slower rank finds the old files until it reaches the same code.

All ranks run ``if not os.path.exists(path): make(path)``, or read a file and then remove it. A rank that runs this code
after rank 0 would find the file that rank 0 has made, and so skip code that draws random numbers, or would not find the
file that rank 0 has removed.

Before rank 0 changes a path, it writes to a memory file the path, the number of collectives that it has started, and a
descriptor of the old file. Another rank uses the old file until it has started a later collective than that number:
only then it is past the code in which rank 0 has changed the path.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.process_group import DefaultGroup

MAX_KEPT = 256
_MAX_KEPT_BYTES = 1024**3
"""Limits on the old files that rank 0 keeps until the next cell: their number and their bytes."""
_NOT_KEPT = -1
"""Written instead of a descriptor: there was a file or folder, but it is not kept."""
_CHANGED_AGAIN = -2
"""Written instead of a descriptor: the path, which was recorded before, changes again after later collectives."""
_UNCHANGED = -3
"""Written instead of a descriptor: the path has not changed after all."""
MAX_COPIED_BYTES = 64 * 1024**2
"""The largest file that is copied, since it is written in place."""


class _Change(NamedTuple):
    """A change of a path by rank 0."""

    line: int
    """The number of its line in the file."""
    number: int
    """The number of collectives before the change."""
    descriptor: int | None
    """The descriptor of the old file or folder, or `_NOT_KEPT`; None if there was none."""


class ChangedPaths:
    """The paths that rank 0 has changed in the current cell.

    Every rank must create this, since rank 0 sends the path of its file. Ranks on other machines, which cannot read the
    file, and ranks with a backend that does not count collectives, find every path in its present state.
    """

    def __init__(self, comm: Communicator) -> None:
        self._process = os.getpid()
        self._cell = 0
        self._changes: dict[str, _Change] = {}
        # By path that rank 0 has recorded, the number of collectives then; None if it was recorded again.
        self._recorded: dict[str, int | None] = {}
        # The paths that rank 0 changes more than once. The other ranks have a record of the first time only.
        self._repeated: set[str] = set()
        self._kept: list[int] = []
        self._kept_bytes = 0
        self._size = self._num_lines = 0
        self._file: BinaryIO | None = None
        self._descriptors = ""
        # The folder of rank 0's descriptors, the descriptor of its file, and the first line of the file.
        address: list[str] | None = None
        if comm.world.is_main and DefaultGroup.num_collectives() is not None:
            self._file = os.fdopen(os.memfd_create("accel_nb_changed_paths"), "r+b", buffering=0)
            address = [f"/proc/{self._process}/fd", str(self._file.fileno()), os.urandom(16).hex()]
            self._file.write(f"{address[2]}\n".encode())
        address = comm.broadcast_json(address)
        if self._file is None and address is not None:
            self._descriptors, number, key = address
            try:
                self._file = open(f"{self._descriptors}/{number}", "rb", buffering=0)  # noqa: SIM115
            except OSError:
                return
            if self._file.readline() != f"{key}\n".encode():  # a file of another machine's process
                self._file.close()
                self._file = None
            else:
                self._size = self._file.tell()
        if self._file is not None:
            weakref.finalize(self, self._file.close)

    def begin(self, cell: int) -> None:
        """Begin a cell, which has the same number on all ranks; all of them have ended the one before."""
        self._cell = cell
        self._changes.clear()
        self._recorded.clear()
        self._repeated.clear()
        for descriptor in self._kept:
            os.close(descriptor)
        self._kept.clear()
        self._kept_bytes = 0

    def needs_record(self, path: str) -> bool:
        """Return whether a change of a path has to be recorded: the first one, and one after later collectives."""
        number = self._recorded.get(path, -1)
        return number is not None and number != DefaultGroup.num_collectives()

    def record(self, path: str, *, is_in_place: bool = False) -> bool:
        """Record that rank 0 is about to change an absolute path; return whether this is the first change of it.

        A file that is written ``is_in_place`` is copied. Files beyond the limits on size and number are not kept. Of a
        path that changes again, after later collectives, this fact is recorded only.
        """
        if self._file is None:
            return False
        if path in self._recorded:
            self._recorded[path] = None
            self._write(path, _CHANGED_AGAIN)
            return False
        try:
            status = os.stat(path)
        except OSError:
            descriptor = None
        else:
            descriptor = self._keep(path, status, is_in_place=is_in_place)
        self._recorded[path] = DefaultGroup.num_collectives()
        self._write(path, descriptor)
        return True

    def cancel(self, path: str) -> None:
        """Record that rank 0 has not changed a path that was recorded: the operation has failed."""
        self._recorded.pop(path, None)
        self._write(path, _UNCHANGED)

    def find(self, path: str) -> str | None:
        """Return the path to open instead of ``path``: the path of the old file or folder, or itself.

        None without one.
        """
        self._read()
        above, descriptor = self._change_of(path)
        if above is None or descriptor == _NOT_KEPT:
            return path
        return None if descriptor is None else f"{self._descriptors}/{descriptor}{path[len(above) :]}"

    def entries_before(self, folder: str) -> Iterator[str]:
        """Yield the paths in a folder that rank 0 has changed, and that exist for this rank."""
        self._read()
        if not self._changes or os.getpid() != self._process:
            return
        now = DefaultGroup.num_collectives() or 0
        for path, change in self._changes.items():
            is_kept = change.descriptor not in (None, _NOT_KEPT)
            if is_kept and change.number >= now and os.path.dirname(path) == folder:
                yield path

    def is_find_certain(self, path: str) -> bool:
        """Return whether `find` certainly returns the file that rank 0 had when it ran this rank's current code."""
        self._read()
        if self._file is None or os.getpid() != self._process or not self._repeated.isdisjoint(_with_parents(path)):
            return False
        return self._change_of(path)[1] != _NOT_KEPT

    def use_present(self, path: str) -> None:
        """Use the present file of a path from now on."""
        self._changes.pop(path, None)

    def has_paths(self) -> bool:
        """Return whether rank 0 has changed paths in code of this cell that this rank may not have reached yet."""
        self._read()
        return bool(self._changes)

    def _keep(self, path: str, status: os.stat_result, *, is_in_place: bool) -> int:
        """Return a descriptor of the present file or folder, which is kept until the next cell, or `_NOT_KEPT`."""
        is_file = stat.S_ISREG(status.st_mode)
        size = status.st_size if is_file else 0
        if not (is_file or stat.S_ISDIR(status.st_mode)) or len(self._kept) >= MAX_KEPT:
            return _NOT_KEPT
        if size + self._kept_bytes > _MAX_KEPT_BYTES or (is_in_place and size > MAX_COPIED_BYTES):
            return _NOT_KEPT
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return _NOT_KEPT
        if is_in_place and is_file:
            with os.fdopen(descriptor, "rb") as source, tempfile.TemporaryFile() as copy:
                shutil.copyfileobj(source, copy)
                copy.flush()
                descriptor = os.dup(copy.fileno())
        self._kept.append(descriptor)
        self._kept_bytes += size
        return descriptor

    def _change_of(self, path: str) -> tuple[str | None, int | None]:
        """Return path and descriptor of the first change, not yet reached by this rank, of a path or a folder above it.

        Later changes concern files that rank 0 has made there since.
        """
        if not self._changes or os.getpid() != self._process:  # a loader's process does not count collectives
            return None, None
        now = DefaultGroup.num_collectives() or 0
        found = [
            (change.line, above, change.descriptor)
            for above in _with_parents(path)
            if (change := self._changes.get(above)) is not None and change.number >= now
        ]
        return min(found)[1:] if found else (None, None)

    def _write(self, path: str, descriptor: int | None) -> None:
        assert self._file is not None
        line = [self._cell, DefaultGroup.num_collectives(), path, descriptor]
        self._file.write(json.dumps(line).encode() + b"\n")

    def _read(self) -> None:
        if self._file is None or os.getpid() != self._process or os.fstat(self._file.fileno()).st_size == self._size:
            return
        content = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size - self._size, self._size)
        complete = content[: content.rfind(b"\n") + 1]
        self._size += len(complete)
        for line in complete.splitlines():
            cell, num_collectives, path, descriptor = json.loads(line)
            self._num_lines += 1
            if cell == self._cell and descriptor == _CHANGED_AGAIN:
                self._repeated.add(path)
            elif cell == self._cell and descriptor == _UNCHANGED:
                self._changes.pop(path, None)
            elif cell == self._cell:
                self._changes[path] = _Change(self._num_lines, num_collectives, descriptor)


def _with_parents(path: str) -> Iterator[str]:
    """Yield a path and the folders that it is in."""
    yield path
    while (folder := os.path.dirname(path)) != path:
        yield folder
        path = folder
