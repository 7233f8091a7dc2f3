"""What each rank printed: bounded, the beginning and the end kept."""

from __future__ import annotations

import codecs
import threading
import uuid
from collections import deque

HEAD_BYTES = 64 * 1024
TAIL_BYTES = 1024 * 1024


class RankLog:
    """One rank's output of a cell, as bytes; what falls out of the middle is counted. Any thread may read it."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_lines = 0
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    @property
    def name(self) -> str:
        """What tells this log from all others; made when it is first asked for, since few are."""
        with self._lock:
            self._name = self._name or uuid.uuid4().hex
            return self._name

    def write(self, data: bytes) -> None:
        """Add bytes."""
        with self._lock:
            self._write(data)

    def _write(self, data: bytes) -> None:
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
        return self._kept()[0].decode(errors="backslashreplace")

    def since(self, seen: int) -> tuple[str, int, int]:
        """Return what was written after byte ``seen``, or all if that is not kept; and the bytes from and to which.

        A character that has not arrived whole is left for the next call.
        """
        kept, tail_start, num_bytes = self._kept()
        start = seen if tail_start <= seen <= num_bytes else 0
        decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        text = decoder.decode(kept[len(kept) - (num_bytes - start) :] if start else kept)
        return text, start, num_bytes - len(decoder.getstate()[0])

    def _kept(self) -> tuple[bytes, int, int]:
        """Return what is kept, the byte from which nothing is missing, and how many there were."""
        with self._lock:
            head, tail, num_bytes = bytes(self._head), b"".join(self._tail)[-TAIL_BYTES:], self.num_bytes
        missing = num_bytes - len(head) - len(tail)
        gap = f"\n[... {missing:,} bytes not kept ...]\n".encode() if missing else b""
        return head + gap + tail, num_bytes - len(tail) if missing else 0, num_bytes

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
