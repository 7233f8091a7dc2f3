"""A type of device for tests: the CPU under another name, with streams that do nothing; it counts calls."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from accel_nb.runtime.devices.base import DeviceMemory
from accel_nb.runtime.devices.cpu import Cpu


class FakeEvent:
    """An event that is complete at once, or with ``is_late`` only after `synchronize`."""

    def __init__(self, calls: Counter[str], *, is_late: bool = False) -> None:
        self._calls = calls
        self._is_ready = not is_late

    def record(self) -> None:
        self._calls["record"] += 1

    def query(self) -> bool:
        return self._is_ready

    def synchronize(self) -> None:
        self._calls["event.synchronize"] += 1
        self._is_ready = True


class FakeStream:
    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls

    def record_event(self) -> FakeEvent:
        self._calls["record_event"] += 1
        return FakeEvent(self._calls)

    def wait_event(self, event: Any) -> None:
        assert isinstance(event, FakeEvent)
        self._calls["wait_event"] += 1

    def synchronize(self) -> None:
        self._calls["stream.synchronize"] += 1


class FakeDevice(Cpu):
    """Computes with the CPU's tensors. torch accepts the name although no backend is registered for it."""

    name = "privateuseone"
    is_host: ClassVar[bool] = False
    trains_by_default: ClassVar[bool] = True
    runs_strategies_of: ClassVar[str | None] = "cuda"
    one_per_worker: ClassVar[bool] = True
    has_streams: ClassVar[bool] = True
    backend: ClassVar[str] = "fakeccl"
    backend_sends_host_tensors: ClassVar[bool] = False

    num_devices = 2

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.are_events_late = False

    def count(self) -> int:
        self.calls["count"] += 1
        return self.num_devices

    def visible_variables(self, first: int, count: int) -> dict[str, str]:
        return {"FAKE_VISIBLE_DEVICES": ",".join(str(index) for index in range(first, first + count))}

    def make_current(self, device: torch.device) -> torch.device:
        self.calls["make_current"] += 1
        return torch.device(device.type, device.index or 0)

    def load(self, device: torch.device | str) -> dict[str, float]:
        self.calls["load"] += 1
        return {"GPU utilization (%)": 90.0, "GPU power (W)": 300.0}

    def memory(self, device: torch.device | str = "cpu") -> DeviceMemory:
        self.calls["memory"] += 1
        return DeviceMemory(100, 300, 1000, 2000)

    def allocator_snapshot(self) -> list[dict[str, Any]]:
        return []

    def seed_beside_torch(self, seed: int) -> None:
        self.calls["seed_beside_torch"] += 1

    def empty_cache(self) -> None:
        self.calls["empty_cache"] += 1

    def synchronize(self, device: torch.device | str) -> None:
        self.calls["synchronize"] += 1

    def new_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self.calls)

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self.calls)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        self.calls["on_stream"] += 1
        return nullcontext()

    def new_event(self) -> FakeEvent:
        return FakeEvent(self.calls, is_late=self.are_events_late)

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        self.calls["record_use"] += 1
