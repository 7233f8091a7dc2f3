"""Results of a host on the kernel's machine: the kernel opens the memory files of the workers, and no bytes are sent.

The kernel opens a file by its path under ``/proc``. Containers and users can separate two processes of a machine, so
the host first offers a file with a random content; files are shared only if the kernel could read it.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from accel_nb.pool.channel import Message
from accel_nb.pool.local.shared_payloads import COPY_BELOW, SharedBuffers, SharedRegion
from accel_nb.pool.payload import Payload, Payloads, close_all

_FILE_NAME = "accel_nb_offer"
_PATH = re.compile(r"/proc/[1-9][0-9]{0,9}/fd/[0-9]{1,9}")
_TOKEN_BYTES = 16


class OfferedFiles:
    """The memory files that the kernel may open, in the host; each stays open until the kernel has opened it."""

    def __init__(self) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._probe = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC)
        os.write(self._probe, self._token)
        self._numbers = itertools.count(1)
        self._files: dict[int, SharedBuffers | SharedRegion] = {}
        self.are_readable = False
        """Whether the kernel could read the first file."""

    def offer(self) -> Message:
        """Return the message that offers the first file to the kernel."""
        return {"kind": "offer", "path": _path(self._probe), "token": self._token.hex()}

    def share(self, payloads: Payloads) -> tuple[dict[str, Any], dict[str, Payload]]:
        """Return the table of the large payloads, which are kept open, and the other payloads."""
        tables: dict[str, Any] = {}
        others: dict[str, Payload] = {}
        for name, payload in payloads.items():
            is_file = isinstance(payload, SharedBuffers | SharedRegion)
            if not self.are_readable or not is_file or _num_bytes(payload) < COPY_BELOW:
                others[name] = payload
                continue
            number = next(self._numbers)
            self._files[number] = payload
            tables[name] = {"number": number, "path": _path(payload.descriptor), "table": payload.table()}
        return tables, others

    def drop(self, numbers: Sequence[int]) -> None:
        """Close files, which the kernel has opened."""
        for number in numbers:
            if (payload := self._files.pop(number, None)) is not None:
                payload.close()

    def close(self) -> None:
        """Close all files."""
        self.drop(list(self._files))
        os.close(self._probe)


def can_open(offer: Message) -> bool:
    """Return whether this process, the kernel, can open the files of a host, by the message that offers one."""
    try:
        descriptor = _open(offer["path"])
    except (OSError, ValueError):
        return False
    try:
        return os.pread(descriptor, _TOKEN_BYTES + 1, 0).hex() == offer["token"]
    finally:
        os.close(descriptor)


def open_payloads(tables: Mapping[str, Any]) -> dict[str, Payload]:
    """Return the payloads of `OfferedFiles.share`.

    Raise OSError if one cannot be opened, and ValueError if one is not valid.
    """
    payloads: dict[str, Payload] = {}
    try:
        for name, entry in tables.items():
            payloads[name] = _open_payload(entry["path"], entry["table"])
    except BaseException:
        close_all(payloads.values())
        raise
    return payloads


def _open_payload(path: Any, table: Mapping[str, Any]) -> Payload:
    descriptor = _open(path)
    try:
        if table["kind"] == "region":
            return SharedRegion(descriptor, table["used_bytes"])
        return SharedBuffers.from_table(descriptor, table)
    except BaseException:
        os.close(descriptor)
        raise


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _open(path: Any) -> int:
    """Open a memory file of ours in another process; a message from elsewhere names no other file."""
    if not isinstance(path, str) or not _PATH.fullmatch(path) or not os.readlink(path).startswith("/memfd:accel_nb_"):
        raise ValueError(f"{path!r:.100} is not the path of a memory file")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _num_bytes(payload: SharedBuffers | SharedRegion) -> int:
    return payload.used_bytes if isinstance(payload, SharedRegion) else os.fstat(payload.descriptor).st_size
