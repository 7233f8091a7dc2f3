"""Whether the system ended a process because memory ran out: its own counters say so. Linux; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Verdict = Literal["group", "machine", "other", "unknown"]
"""Why a process got SIGKILL: its control group had no memory left, the machine had none, neither, or nobody knows."""

_COUNTER = "oom_kill"


@dataclass(slots=True)
class KillCounters:
    """Reads how many processes the system has ended for lack of memory; remembers what it has read."""

    proc: Path = Path("/proc")
    groups: Path = Path("/sys/fs/cgroup")
    _known: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = self._read()

    def verdict(self) -> Verdict:
        """Say why a process that has just been ended by SIGKILL was; each kill that was counted explains one."""
        now = self._read()
        before, self._known = self._known, now
        if not now:
            return "unknown"
        # Of several ranks the system ends one; those that follow, because they waited for it, are ended by us.
        if now.get("group", 0) > before.get("group", 0):
            return "group"
        return "machine" if now.get("machine", 0) > before.get("machine", 0) else "other"

    def _read(self) -> dict[str, int]:
        group = next((count for path in self._group_files() if (count := _counted(path)) is not None), None)
        machine = _counted(self.proc / "vmstat")
        return {name: count for name, count in (("group", group), ("machine", machine)) if count is not None}

    def _group_files(self) -> list[Path]:
        """Return where this process's control group may count, the most exact first: version 2, then version 1."""
        try:
            lines = [line.split(":", 2) for line in (self.proc / "self" / "cgroup").read_text().splitlines()]
        except OSError:
            return []
        found: list[Path] = []
        for _, controllers, path in (line for line in lines if len(line) == 3):
            if controllers == "":
                found += [self.groups / path.lstrip("/") / "memory.events", self.groups / "memory.events"]
            elif controllers == "memory":
                base = self.groups / "memory"
                found += [base / path.lstrip("/") / "memory.oom_control", base / "memory.oom_control"]
        return found


def _counted(path: Path) -> int | None:
    """Return the counter of a file of names and numbers; None where there is none."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
        return next((int(line[1]) for line in words if len(line) == 2 and line[0] == _COUNTER), None)
    except (OSError, ValueError):
        return None
