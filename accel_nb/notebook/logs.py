"""What each rank printed: bounded, the beginning and the end kept."""

from __future__ import annotations

import codecs
from collections import deque

HEAD_BYTES = 64 * 1024
TAIL_BYTES = 1024 * 1024


class RankLog:
    """One rank's output of a cell, as bytes; what falls out of the middle is counted."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_lines = 0
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def write(self, data: bytes) -> None:
        """Add bytes."""
        self.num_bytes += len(data)
        self.num_lines += data.count(b"\n")
        room = HEAD_BYTES - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_bytes += len(data)
            while self._tail_bytes - len(self._tail[0]) > TAIL_BYTES:
                self._tail_bytes -= len(self._tail.popleft())

    def text(self) -> str:
        """Return what is kept, with a line where something is missing."""
        tail = b"".join(self._tail)[-TAIL_BYTES:]
        missing = self.num_bytes - len(self._head) - len(tail)
        gap = f"\n[... {missing:,} bytes not kept ...]\n".encode() if missing else b""
        return (bytes(self._head) + gap + tail).decode(errors="backslashreplace")

    def last_lines(self, num_bytes: int = 2000) -> str:
        """Return the end of what was printed."""
        return self.text()[-num_bytes:]


class Decoder:
    """Turns a rank's bytes into text, holding back a character that has not arrived whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")

    def decode(self, data: bytes) -> str:
        """Return the text that is complete."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return what was held back: a character that will not arrive whole any more."""
        return self._decoder.decode(b"", final=True)
