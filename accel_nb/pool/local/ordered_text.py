"""The order of what a rank prints and of the notes that it sends: they come by a pipe and by a socket.

A rank writes a mark into its output before it sends a note. The reader holds what follows a mark until it has read the
note.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

_MARK = re.compile(rb"\x00accel_nb ([0-9a-f]{8})\x00")


class MarkWriter:
    """Writes marks into this process's output, while that is what it was at the start."""

    def __init__(self) -> None:
        self._pipes = {descriptor: os.fstat(descriptor) for descriptor in (1, 2)}
        self._number = 0

    def write(self) -> int:
        """Write a mark, which the note that follows has to name, and return its number."""
        self._number += 1
        for descriptor, pipe in self._pipes.items():
            with suppress(OSError):  # code has closed it
                if os.path.samestat(os.fstat(descriptor), pipe):  # else code has directed it elsewhere
                    os.write(descriptor, b"\x00accel_nb %08x\x00" % self._number)
        return self._number


class OrderedText:
    """The output of a rank by one pipe. Marks are taken out."""

    def __init__(self) -> None:
        self._held = b""
        self._last_note = 0

    def add(self, data: bytes) -> bytes:
        """Return held text and ``data``, up to the first mark of a note that has not been read."""
        self._held += data
        return self._release()

    def record_note(self, mark: int) -> bytes:
        """Record that the note of a mark has been read, and return the text that follows."""
        self._last_note = max(self._last_note, mark)
        return self._release()

    def finish(self) -> bytes:
        """Return all text: no more notes follow."""
        rest, self._held = _MARK.sub(b"", self._held), b""
        return rest

    def _release(self) -> bytes:
        released: list[bytes] = []
        place = 0
        while (mark := _MARK.search(self._held, place)) is not None:
            released.append(self._held[place : mark.start()])
            place = mark.start()
            if int(mark[1], 16) > self._last_note:
                break
            place = mark.end()
        else:
            released.append(self._held[place:])
            place = len(self._held)
        self._held = self._held[place:]
        return b"".join(released)
