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
from typing import BinaryIO

from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.process_group import DefaultGroup

MAX_KEPT = 256
_MAX_KEPT_BYTES = 1024**3
"""Limits on the old files that rank 0 keeps until the next cell: their number and their bytes."""
MAX_COPIED_BYTES = 64 * 1024**2
"""The largest file that is copied, since it is written in place."""


class ChangedPaths:
    """The paths that rank 0 has changed in the current cell.

    Every rank must create this, since rank 0 sends the path of its file. For ranks on other machines, which
    cannot read the file, and with a backend that does not count collectives, every path is what it is now.
    """

    def __init__(self, comm: Communicator) -> None:
        self._process = os.getpid()
        self._cell = 0
        # By path: the number of collectives before the change, and the descriptor of what it was; None for nothing.
        self._changes: dict[str, tuple[int, int | None]] = {}
        self.recorded: set[str] = set()
        self._kept: list[int] = []
        self._kept_bytes = 0
        self._size = 0
        self._file: BinaryIO | None = None
        self._descriptors = ""
        # The folder of rank 0's descriptors, the number of that of its file, and the first line of the file.
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
        self.recorded.clear()
        for descriptor in self._kept:
            os.close(descriptor)
        self._kept.clear()
        self._kept_bytes = 0

    def record(self, path: str, *, is_in_place: bool = False) -> None:
        """Record that rank 0 is about to create, write, move or remove an absolute path.

        A file that is written ``is_in_place`` is copied. Files beyond the limits on size and number are not kept.
        """
        if self._file is None:
            return
        try:
            status = os.stat(path)
        except OSError:
            descriptor = None
        else:
            if (descriptor := self._keep(path, status, is_in_place=is_in_place)) is None:
                return
        self.recorded.add(path)
        line = [self._cell, DefaultGroup.num_collectives(), path, descriptor]
        self._file.write(json.dumps(line).encode() + b"\n")

    def find(self, path: str) -> str | None:
        """Return the path of the file that this rank finds at a path: of the old one, or itself; None for no file."""
        self._read()
        if not self._changes or os.getpid() != self._process:  # a loader's process does not count collectives
            return path
        now = DefaultGroup.num_collectives() or 0
        above = path
        while True:
            number, descriptor = self._changes.get(above, (-1, None))
            if number >= now:
                return None if descriptor is None else f"{self._descriptors}/{descriptor}{path[len(above) :]}"
            folder = os.path.dirname(above)
            if folder == above:
                return path
            above = folder

    def entries_before(self, folder: str) -> Iterator[str]:
        """Yield the paths in a folder that rank 0 has changed, and that exist for this rank."""
        self._read()
        if not self._changes or os.getpid() != self._process:
            return
        now = DefaultGroup.num_collectives() or 0
        for path, (number, descriptor) in self._changes.items():
            if descriptor is not None and number >= now and os.path.dirname(path) == folder:
                yield path

    def include(self, path: str) -> None:
        """Use the present file of a path from now on."""
        self._changes.pop(path, None)

    def has_paths(self) -> bool:
        """Return whether rank 0 has changed paths in code of this cell that this rank may not have reached yet."""
        self._read()
        return bool(self._changes)

    def _keep(self, path: str, status: os.stat_result, *, is_in_place: bool) -> int | None:
        """Return a descriptor of what a path is now, which stays until the next cell."""
        is_file = stat.S_ISREG(status.st_mode)
        size = status.st_size if is_file else 0
        if not (is_file or stat.S_ISDIR(status.st_mode)) or len(self._kept) >= MAX_KEPT:
            return None
        if size + self._kept_bytes > _MAX_KEPT_BYTES or (is_in_place and size > MAX_COPIED_BYTES):
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        if is_in_place and is_file:
            with os.fdopen(descriptor, "rb") as source, tempfile.TemporaryFile() as copy:
                shutil.copyfileobj(source, copy)
                copy.flush()
                descriptor = os.dup(copy.fileno())
        self._kept.append(descriptor)
        self._kept_bytes += size
        return descriptor

    def _read(self) -> None:
        if self._file is None or os.getpid() != self._process or os.fstat(self._file.fileno()).st_size == self._size:
            return
        content = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size - self._size, self._size)
        complete = content[: content.rfind(b"\n") + 1]
        self._size += len(complete)
        for line in complete.splitlines():
            cell, num_collectives, path, descriptor = json.loads(line)
            if cell == self._cell:
                self._changes[path] = num_collectives, descriptor
