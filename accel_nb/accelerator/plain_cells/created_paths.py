"""Paths that the first rank creates in a plain cell, which the other ranks must not find before they get there.

All ranks run ``if not os.path.exists(path): make(path)``. A rank that comes late would find what the first rank has
made, and skip what draws random numbers there. The first rank writes each path that it creates to a memory file, with
the number of collectives that it has started. For another rank the path is absent until that rank has started a later
collective: then the first rank had created it before.
"""

from __future__ import annotations

import json
import os
import weakref
from typing import BinaryIO

from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.process_group import DefaultGroup


class CreatedPaths:
    """The paths that the first rank has created in the current cell.

    Every rank must create this, since the first one sends the place of its file. For ranks on other machines, which
    cannot read the file, and with a backend that does not count collectives, every path is present once it exists.
    """

    def __init__(self, comm: Communicator) -> None:
        self._process = os.getpid()
        self._cell = 0
        self._ahead: dict[str, int] = {}
        self._size = 0
        self._file: BinaryIO | None = None
        place: list[str] | None = None
        if comm.world.is_main and DefaultGroup.num_collectives() is not None:
            self._file = os.fdopen(os.memfd_create("accel_nb_created_paths"), "r+b", buffering=0)
            place = [f"/proc/{self._process}/fd/{self._file.fileno()}", os.urandom(16).hex()]
            self._file.write(f"{place[1]}\n".encode())
        place = comm.broadcast_json(place)
        if self._file is None and place is not None:
            path, key = place
            try:
                self._file = open(path, "rb", buffering=0)  # noqa: SIM115
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
        """Begin a cell, which has the same number on all ranks."""
        self._cell = cell
        self._ahead.clear()

    def record(self, path: str) -> None:
        """Record that the first rank is about to create an absolute path."""
        if self._file is not None:
            self._file.write(json.dumps([self._cell, DefaultGroup.num_collectives(), path]).encode() + b"\n")

    def is_ahead(self, path: str) -> bool:
        """Whether the first rank has created an absolute path, or a folder above it, and this rank is not as far."""
        self._read()
        if not self._ahead or os.getpid() != self._process:  # a loader's process does not count collectives
            return False
        now = DefaultGroup.num_collectives() or 0
        while True:
            if self._ahead.get(path, -1) >= now:
                return True
            folder = os.path.dirname(path)
            if folder == path:
                return False
            path = folder

    def include(self, path: str) -> None:
        """Treat a path as present from now on."""
        self._ahead.pop(path, None)

    def has_paths(self) -> bool:
        """Whether the first rank has created paths in this cell that this rank may not have reached."""
        self._read()
        return bool(self._ahead)

    def _read(self) -> None:
        if self._file is None or os.getpid() != self._process or os.fstat(self._file.fileno()).st_size == self._size:
            return
        content = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size - self._size, self._size)
        complete = content[: content.rfind(b"\n") + 1]
        self._size += len(complete)
        for line in complete.splitlines():
            cell, num_collectives, path = json.loads(line)
            if cell == self._cell:
                self._ahead[path] = num_collectives
