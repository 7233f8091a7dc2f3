"""A store for process groups that forwards calls over a socket, for ranks that share no file and no port."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

MAX_PACKET = 1024 * 1024


class SocketStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """A key-value store behind one end of a ``SOCK_SEQPACKET`` pair; the process at the other end answers the calls.

    A call and its answer are one JSON packet each. Calls of several threads are sent one after another. The names of
    the methods are those that torch's C++ code calls.
    """

    def __init__(self, connection: socket.socket, *, timeout_s: float) -> None:
        super().__init__()
        self._connection = connection
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._number = 0

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._call("set", [key], value=_text(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until it is set."""
        return _bytes(self._call("get", [key]))

    def add(self, key: str, value: int) -> int:
        """Add to the number of a key, which is 0 if the key is not set, and return the sum."""
        return int(self._call("add", [key], amount=value))

    def append(self, key: str, value: bytes | str) -> None:
        """Append to the value of a key."""
        self._call("append", [key], value=_text(value))

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Set a key if it has the expected value, or if it is not set and nothing is expected; return its value."""
        return _bytes(self._call("compare_set", [key], expected=_text(expected_value), value=_text(desired_value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._call("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        self._call("wait", list(keys), timeout_s=None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it was set."""
        return bool(self._call("delete", [key]))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._call("count", []))

    deleteKey = delete_key
    getNumKeys = num_keys

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys; wait until they are set."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return whether the store has ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def clone(self) -> SocketStore:
        """Return this store, which several threads may use."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call waits."""
        self._timeout_s = timeout.total_seconds()

    def _call(self, name: str, keys: list[str], *, timeout_s: float | None = None, **values: Any) -> Any:
        with self._lock:
            self._number += 1
            number = self._number
            call = {"kind": "call", "number": number, "name": name, "keys": keys, **values}
            self._connection.settimeout(self._timeout_s if timeout_s is None else timeout_s)
            try:
                self._connection.send(json.dumps(call).encode())
                while True:
                    packet = self._connection.recv(MAX_PACKET)
                    if not packet:
                        raise dist.DistNetworkError("the process group's store is closed: ranks open a new group")
                    answer = json.loads(packet)
                    if answer["number"] == number:  # the answer of a call that was interrupted may come first
                        return answer["value"]
            except TimeoutError:
                raise dist.DistStoreError(f"no rank has set {', '.join(keys)} in time") from None


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
