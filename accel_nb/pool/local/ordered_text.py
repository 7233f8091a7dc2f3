"""The order between a rank's output and its messages, which arrive through different channels: pipes and a socket.

Before `send_message_in_order` sends a message, it writes a mark into the rank's output. The reader holds the output
after a mark back until it has read the message.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

_MARK = re.compile(rb"\x00accel_nb ([0-9a-f]{8})\x00")
_START, _NUM_DIGITS = b"\x00accel_nb ", 8


class MarkWriter:
    """Writes marks into the pipes that were this process's output at the start."""

    def __init__(self) -> None:
        self._pipes = {descriptor: os.fstat(descriptor) for descriptor in (1, 2)}
        self._number = 0

    def write(self) -> int:
        """Write a mark, and return its number for the message that is sent next."""
        self._number += 1
        for descriptor, pipe in self._pipes.items():
            with suppress(OSError):  # user code has closed it
                if os.path.samestat(os.fstat(descriptor), pipe):  # else user code has redirected it
                    os.write(descriptor, b"\x00accel_nb %08x\x00" % self._number)
        return self._number


class OrderedText:
    """The output of a rank from one pipe, without the marks."""

    def __init__(self) -> None:
        self._held = b""
        self._last_message = 0

    def add(self, data: bytes) -> bytes:
        """Return the text that was held back and ``data``, up to the first mark whose message has not been read."""
        self._held += data
        return self._release()

    def record_message(self, mark: int) -> bytes:
        """Record that the message of a mark was read; return the text up to the next mark whose message was not."""
        self._last_message = max(self._last_message, mark)
        return self._release()

    def finish(self) -> bytes:
        """Return all remaining text; call it when no more messages can arrive."""
        rest, self._held = _MARK.sub(b"", self._held), b""
        return rest

    def _release(self) -> bytes:
        released: list[bytes] = []
        place = 0
        while (mark := _MARK.search(self._held, place)) is not None:
            released.append(self._held[place : mark.start()])
            place = mark.start()
            if int(mark[1], 16) > self._last_message:
                break
            place = mark.end()
        else:
            end = _end_of_text(self._held, place)
            released.append(self._held[place:end])
            place = end
        self._held = self._held[place:]
        return b"".join(released)


def _end_of_text(data: bytes, start: int) -> int:
    """Return where the text ends in data that may end within a mark, whose other bytes have not been read yet."""
    place = data.rfind(b"\x00", start)
    tail = data[place:] if place >= 0 else b""
    digits = tail[len(_START) :]
    is_start = _START.startswith(tail[: len(_START)]) and re.fullmatch(rb"[0-9a-f]*", digits) is not None
    return place if tail and is_start and len(digits) <= _NUM_DIGITS else len(data)
