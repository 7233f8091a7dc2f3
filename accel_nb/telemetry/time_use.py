"""Time use of a rank's training thread and load of its device, measured without waiting for the device."""

from __future__ import annotations

import time

import torch

from accel_nb.runtime.devices.registry import device_type
from accel_nb.telemetry.device_load import DeviceLoadMeter
from accel_nb.telemetry.events import EventSink, TimeUsed

_SCHEDSTAT = "/proc/thread-self/schedstat"


class TimeMeter:
    """Reports a `TimeUsed` for the time between two samples, on the thread that trains, and the device's load.

    Reading is measured at the loaders. On the CPU, the time in which the thread computes and the time in which it waits
    for a free processor are the operating system's (``Documentation/scheduler/sched-stats.rst`` of Linux); in the rest
    it was blocked, as it is in exchanges with other ranks. On other devices the thread queues work for the device, so
    all time that is not reading counts as computing.
    """

    def __init__(self, rank: int, device: torch.device | str, sink: EventSink) -> None:
        self._rank = rank
        self._sink = sink
        self._load = DeviceLoadMeter(rank, device, sink)
        self._is_host = device_type(device).is_host
        self._read_s = 0.0
        self._read_cpu_s = 0.0
        self._started: float | None = None
        self._cpu_s, self._queued_s = 0.0, 0.0

    def add_read(self, started: float, cpu_started: float) -> None:
        """Count a batch that was read since ``started`` (`time.perf_counter`), ``cpu_started`` (`time.thread_time`)."""
        self._read_s += time.perf_counter() - started
        self._read_cpu_s += time.thread_time() - cpu_started

    def sample(self, now: float, step: int) -> None:
        """Report the time since the last call until ``now`` (`time.perf_counter`); the first call starts the clock."""
        cpu_s, queued_s = _thread_seconds()
        if self._started is not None:
            total = now - self._started
            read = min(self._read_s, total)
            rest = total - read
            computing, queued = rest, 0.0
            if self._is_host:
                ran = max(cpu_s - self._cpu_s, 1e-9)
                computing = min(max(0.0, ran - self._read_cpu_s), rest)
                # A thread waits for a processor where it runs: reading has its part of this time.
                queued = (queued_s - self._queued_s) * (1 - min(1.0, self._read_cpu_s / ran))
                queued = max(0.0, min(queued, rest - computing))  # below 0 if another thread was measured before
            blocked = max(0.0, rest - computing - queued)
            self._sink.emit(TimeUsed(self._rank, step, time.time(), read, computing, blocked, queued))
        self._load.sample(now, step)
        self._started, self._cpu_s, self._queued_s = now, cpu_s, queued_s
        self._read_s = self._read_cpu_s = 0.0


def _thread_seconds() -> tuple[float, float]:
    """Return the seconds that this thread has run, and that it was ready but had no processor (0 if not known)."""
    try:
        with open(_SCHEDSTAT, "rb") as file:
            ran, queued, _ = file.read().split()
    except (OSError, ValueError):  # another system, or a kernel without these statistics
        return time.thread_time(), 0.0
    return int(ran) / 1e9, int(queued) / 1e9
