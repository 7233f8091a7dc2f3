"""Bounded logs of the text that each rank printed: the beginning and the end are stored."""

from __future__ import annotations

import codecs
import threading
import uuid
from collections import deque

HEAD_BYTES = 64 * 1024
TAIL_BYTES = 1024 * 1024


class RankLog:
    """One rank's output of a cell, as bytes; dropped bytes in the middle are counted. Thread-safe."""

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
        """A unique name, generated on first use."""
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
        """Return the stored text, with a line in place of dropped bytes."""
        return self._stored()[0].decode(errors="backslashreplace")

    def text_since(self, seen: int) -> tuple[str, int, int]:
        """Return the text after byte ``seen``, or all text if that byte was dropped, and its start and end offsets.

        An incomplete character at the end is left for the next call.
        """
        stored, tail_start, num_bytes = self._stored()
        start = seen if tail_start <= seen <= num_bytes else 0
        decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        text = decoder.decode(stored[len(stored) - (num_bytes - start) :] if start else stored)
        return text, start, num_bytes - len(decoder.getstate()[0])

    def _stored(self) -> tuple[bytes, int, int]:
        """Return the stored bytes, the offset from which none are missing, and the total number of bytes."""
        with self._lock:
            head, tail, num_bytes = bytes(self._head), b"".join(self._tail)[-TAIL_BYTES:], self.num_bytes
        missing = num_bytes - len(head) - len(tail)
        gap = f"\n[... {missing:,} bytes not kept ...]\n".encode() if missing else b""
        return head + gap + tail, num_bytes - len(tail) if missing else 0, num_bytes

    def end_of_text(self, num_characters: int = 2000) -> str:
        """Return the last ``num_characters`` characters that were printed."""
        return self.text()[-num_characters:]


class Decoder:
    """An incremental decoder of a rank's bytes; buffers an incomplete character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")

    def decode(self, data: bytes) -> str:
        """Return the complete characters."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return the buffered rest, with escapes."""
        return self._decoder.decode(b"", final=True)
