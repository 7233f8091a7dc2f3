"""Whether the system killed a process for lack of memory, from its counters. Linux; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

KillCause = Literal["group", "machine", "other", "unknown"]
"""Why a process got SIGKILL: its control group was out of memory, the machine was, neither, or it is not known."""

_COUNTER = "oom_kill"


@dataclass(slots=True)
class KillCounters:
    """Counters of processes that the system has killed for lack of memory, as of the last reading."""

    proc: Path = Path("/proc")
    groups: Path = Path("/sys/fs/cgroup")
    _known: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = self._read()

    def kill_cause(self) -> KillCause:
        """Return why a process has just been killed by SIGKILL; each counted kill explains one process."""
        now = self._read()
        before, self._known = self._known, now
        if not now:
            return "unknown"
        # The system kills one of several ranks; the pool ends the others, which waited for it.
        if now.get("group", 0) > before.get("group", 0):
            return "group"
        return "machine" if now.get("machine", 0) > before.get("machine", 0) else "other"

    def _read(self) -> dict[str, int]:
        group = next((count for path in self._group_files() if (count := _counted(path)) is not None), None)
        machine = _counted(self.proc / "vmstat")
        return {name: count for name, count in (("group", group), ("machine", machine)) if count is not None}

    def _group_files(self) -> list[Path]:
        """Return the files that may hold the counters of this process's control group, most specific first."""
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
