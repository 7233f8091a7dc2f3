"""Which GPUs are found, with a simulated management library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from accel_nb.notebook.reports.doctor import diagnose
from accel_nb.runtime.process.hardware import inspect_machine, list_gpus


class Error(Exception):
    pass


@dataclass
class Device:
    uuid: str
    is_lost: bool = False
    parts: tuple[str, ...] | None = None


class Library:
    """Answers as the driver's library does for the devices it is given."""

    NVMLError = Error
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *devices: Device) -> None:
        self.devices = devices

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        if self.devices[index].is_lost:
            raise Error("GPU is lost")
        return self.devices[index]

    def nvmlDeviceGetMigMode(self, device: Device) -> tuple[int, int]:
        if device.parts is None:
            raise Error("Not Supported")
        return int(bool(device.parts)), 0

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Device) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, place: int) -> Device:
        if not device.parts or place >= len(device.parts):
            raise Error("Not Found")
        return Device(device.parts[place])

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> SimpleNamespace:
        return SimpleNamespace(total=80, free=70)

    def nvmlDeviceGetName(self, device: Device) -> str:
        return f"name of {device.uuid}"

    def nvmlDeviceGetCudaComputeCapability(self, device: Device) -> tuple[int, int]:
        if device.uuid.startswith("MIG-"):
            raise Error("Not Supported")
        return (9, 0)

    def nvmlDeviceGetUUID(self, device: Device) -> str:
        return device.uuid


A, B, C = Device("GPU-a"), Device("GPU-b"), Device("GPU-c")
DIVIDED = Device("GPU-d", parts=("MIG-1", "MIG-2"))


@pytest.mark.parametrize(
    ("devices", "visible", "expected"),
    [
        ([A, B], None, ["GPU-a", "GPU-b"]),
        ([A, B], [], []),
        ([A, B, C], ["2", "0"], ["GPU-c", "GPU-a"]),
        ([A, B, C], ["GPU-b", "7", "0"], ["GPU-b"]),
        ([DIVIDED], None, ["MIG-1"]),
        ([DIVIDED], ["MIG-2"], ["MIG-2"]),
        ([DIVIDED], ["MIG-2", "MIG-1"], ["MIG-2"]),
        ([DIVIDED], ["0"], ["MIG-1"]),
        ([A, DIVIDED], None, ["GPU-a"]),
        ([Device("GPU-e", parts=())], None, ["GPU-e"]),
        ([A, Device("GPU-f", is_lost=True), C], None, ["GPU-a", "GPU-c"]),
        ([A, Device("GPU-f", is_lost=True), C], ["2"], ["GPU-c"]),
    ],
)
def test_the_devices_that_a_process_would_see(devices, visible, expected):
    gpus, problems = list_gpus(Library(*devices), visible)
    assert [gpu.name.removeprefix("name of ") for gpu in gpus] == expected
    assert all(gpu.capability == (9, 0) for gpu in gpus)
    assert list(problems) == (["GPU 1 cannot be read: GPU is lost"] if any(d.is_lost for d in devices) else [])


def test_the_doctor_names_a_gpu_that_cannot_be_read():
    machine = replace(inspect_machine(), gpu_problems=("GPU 1 cannot be read: GPU is lost",))
    assert any("GPU 1 cannot be read" in str(finding) and finding.level == "warning" for finding in diagnose(machine))
