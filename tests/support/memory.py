"""The peak memory of a process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from accel_nb.bigmodel.host_memory import trim_heap


def peak_bytes() -> int:
    """Return the peak of this program's resident memory; ``ru_maxrss`` would be at least that of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def grown_bytes(run: Callable[[], object]) -> int:
    """Return the largest growth of this process's resident memory during a call."""
    gc.collect()
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = peak_bytes()
    run()
    return peak_bytes() - before
