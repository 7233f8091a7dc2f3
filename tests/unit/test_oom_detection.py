"""The system's counters of kills for lack of memory, as files; and what is said of a rank that got SIGKILL."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_nb.notebook.messages import RankAnswer
from accel_nb.notebook.session.error_translation import error_from_answers
from accel_nb.pool.control.stop_escalation import WorkerDeath
from accel_nb.runtime.process.oom_detection import KillCause, KillCounters
from accel_nb.telemetry.events import MemorySample


class System:
    """Files as the kernel of a system has them."""

    def __init__(self, folder: Path, version: int | None) -> None:
        self.proc, self.groups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        lines = {2: "0::/app/job\n", 1: "5:cpu:/\n4:memory:/app/job\n0::/\n", None: ""}
        (self.proc / "self" / "cgroup").write_text(lines[version])
        base = self.groups / "memory" if version == 1 else self.groups
        self.group = base / "app/job" / ("memory.oom_control" if version == 1 else "memory.events")
        self.group.parent.mkdir(parents=True)
        self.count(0, 0)

    def count(self, group: int, machine: int) -> None:
        self.group.write_text(f"low 0\noom 3\noom_kill {group}\noom_group_kill 0\n")
        (self.proc / "vmstat").write_text(f"nr_free_pages 1\noom_kill {machine}\n")

    def counters(self) -> KillCounters:
        return KillCounters(self.proc, self.groups)


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_in_the_own_group_is_distinguished_from_others(tmp_path: Path, version: int) -> None:
    system = System(tmp_path, version)
    counters = system.counters()
    assert counters.kill_cause() == "other"
    system.count(1, 1)
    assert counters.kill_cause() == "group"
    assert counters.kill_cause() == "other", "each kill is reported once"
    system.count(1, 2)
    assert counters.kill_cause() == "machine"


def test_where_nothing_is_counted_nothing_is_claimed(tmp_path: Path) -> None:
    assert KillCounters(tmp_path, tmp_path).kill_cause() == "unknown"
    system = System(tmp_path / "odd", None)
    (system.proc / "vmstat").write_text("oom_kill many\n")
    assert system.counters().kill_cause() == "unknown"


@pytest.mark.parametrize(
    ("killed_for", "words"),
    [
        ("group", "SIGKILL by the system: the memory that its container"),
        ("machine", "SIGKILL by the system, as it seems"),
        ("other", "SIGKILL (not by the system for lack of memory"),
        ("unknown", "SIGKILL (often the system running out of memory)"),
    ],
)
def test_the_reason_is_reported_with_what_was_measured_last(killed_for: KillCause, words: str) -> None:
    death = WorkerDeath(-9, False, killed_for)
    sample = MemorySample(1, 12, 0.0, 2**30, 2**30, 2**31, 5 * 2**30, 0, 2**20)
    error = error_from_answers([RankAnswer(1, "died", death=death)], "death", {}, None, memory={1: sample})
    assert words in str(error)
    is_reported = "At step 12, when it was measured last: parameters 1.00 GiB" in str(error)
    assert is_reported == (killed_for in ("group", "machine"))
