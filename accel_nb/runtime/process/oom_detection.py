"""Detection of processes that the system killed for lack of memory, by Linux's counters; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

KillCause = Literal["group", "machine", "other", "unknown"]
"""The cause of a SIGKILL: the control group or the machine was out of memory, neither, or unknown."""

_COUNTER = "oom_kill"


@dataclass(slots=True)
class KillCounters:
    """Counters of processes that the system has killed for lack of memory, as of the last reading."""

    proc: Path = Path("/proc")
    cgroup_root: Path = Path("/sys/fs/cgroup")
    _counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._counts = self._read()

    def kill_cause(self) -> KillCause:
        """Return the probable cause of the SIGKILL that has just ended a process.

        A call that finds a higher counter attributes the kill to lack of memory; a second call needs a further
        increase.
        """
        now = self._read()
        before, self._counts = self._counts, now
        if not now:
            return "unknown"
        # The system has killed one rank; the pool kills the others, which wait for it, and these are not counted.
        if now.get("group", 0) > before.get("group", 0):
            return "group"
        return "machine" if now.get("machine", 0) > before.get("machine", 0) else "other"

    def _read(self) -> dict[str, int]:
        group = next((count for path in self._cgroup_files() if (count := _read_counter(path)) is not None), None)
        machine = _read_counter(self.proc / "vmstat")
        return {name: count for name, count in (("group", group), ("machine", machine)) if count is not None}

    def _cgroup_files(self) -> list[Path]:
        """Return the files that may hold the counters of this process's control group, most specific first."""
        try:
            lines = [line.split(":", 2) for line in (self.proc / "self" / "cgroup").read_text().splitlines()]
        except OSError:
            return []
        found: list[Path] = []
        for _, controllers, path in (line for line in lines if len(line) == 3):
            if controllers == "":
                found += [self.cgroup_root / path.lstrip("/") / "memory.events", self.cgroup_root / "memory.events"]
            elif controllers == "memory":
                base = self.cgroup_root / "memory"
                found += [base / path.lstrip("/") / "memory.oom_control", base / "memory.oom_control"]
        return found


def _read_counter(path: Path) -> int | None:
    """Return the counter in a file with lines of a name and a number; None if it has none."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
        return next((int(line[1]) for line in words if len(line) == 2 and line[0] == _COUNTER), None)
    except (OSError, ValueError):
        return None
