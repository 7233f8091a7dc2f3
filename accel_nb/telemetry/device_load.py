"""Utilization, power and temperature of a rank's device over time."""

from __future__ import annotations

import math
import time

import torch

from accel_nb.runtime.devices.registry import device_type
from accel_nb.telemetry.events import DeviceLoad, EventSink

INTERVAL_S = 1.0
"""Minimum time between two readings of the sensors, which take some 0.1 ms each."""


class DeviceLoadMeter:
    """Reports a `DeviceLoad` for each sensor of a device, at most once in a second."""

    def __init__(self, rank: int, device: torch.device | str, sink: EventSink) -> None:
        self._rank = rank
        self._device = device
        self._type = device_type(device)
        self._sink = sink
        self._due = -math.inf

    def sample(self, now: float, step: int) -> None:
        """Read the sensors if they are due at ``now`` (`time.perf_counter`); without any they are never due again."""
        if now < self._due:
            return
        measured = self._type.load(self._device)
        self._due = now + INTERVAL_S if measured else math.inf
        for name, value in measured.items():
            self._sink.emit(DeviceLoad(self._rank, step, time.time(), name, value))
