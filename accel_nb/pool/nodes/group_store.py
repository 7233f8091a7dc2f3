"""The values with which the ranks of all nodes find each other when they open a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Answer = Callable[[Any], None]


class GroupStore:
    """The keys of one process group, kept in the kernel; the caller must not call it in two threads at once."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[list[str], str, Answer]] = []

    def call(self, name: str, keys: list[str], values: dict[str, Any], answer: Answer) -> None:
        """Execute a call of `SocketStore`; ``answer`` is called with the result, later if the call has to wait."""
        key = keys[0] if keys else ""
        if name in ("get", "wait"):
            self._waiting.append((keys, name, answer))
        elif name == "set":
            self._values[key] = values["value"]
            answer(None)
        elif name == "append":
            self._values[key] = self._values.get(key, "") + values["value"]
            answer(None)
        elif name == "add":
            total = int(self._values.get(key, "0")) + int(values["amount"])
            self._values[key] = str(total)
            answer(total)
        elif name == "compare_set":
            if self._values.get(key, "") == values["expected"]:
                self._values[key] = values["value"]
            answer(self._values.get(key, values["expected"]))
        elif name == "check":
            answer(all(key in self._values for key in keys))
        elif name == "delete":
            answer(self._values.pop(key, None) is not None)
        elif name == "count":
            answer(len(self._values))
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for keys, name, answer in waiting:
            if all(key in self._values for key in keys):
                answer(self._values[keys[0]] if name == "get" else None)
            else:
                self._waiting.append((keys, name, answer))
