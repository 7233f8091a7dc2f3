"""What this machine has, found without torch and without touching any device context."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

import psutil

from accel_nb.runtime.environment import visible_gpus


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device as the driver's management library describes it; memory in bytes."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]

    @property
    def has_real_bf16(self) -> bool:
        """Whether bf16 arithmetic is in the hardware (compute capability 8.0 and newer), not emulated."""
        return self.capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class Machine:
    """Processors, memory and devices of this machine; sizes in bytes."""

    num_cores: int
    total_bytes: int
    free_bytes: int
    shm_free_bytes: int
    disk_free_bytes: int
    gpus: tuple[Gpu, ...]


def inspect_machine() -> Machine:
    """Look at this machine now. Reads the driver's management library; makes no device context."""
    memory = psutil.virtual_memory()
    return Machine(
        num_cores=num_usable_cores(),
        total_bytes=memory.total,
        free_bytes=memory.available,
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        disk_free_bytes=shutil.disk_usage(os.getcwd()).free,
        gpus=find_gpus(),
    )


def num_usable_cores() -> int:
    """Count the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_gpus() -> tuple[Gpu, ...]:
    """List the CUDA devices that torch would see, in its order; empty without a driver."""
    if not os.path.exists("/dev/nvidiactl"):
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        every = [_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    visible = visible_gpus()
    if visible is None:
        return tuple(gpu for gpu, _ in every)
    chosen: list[Gpu] = []
    for entry in visible:
        match = [gpu for gpu, uuid in every if entry == str(gpu.index) or uuid.startswith(entry)]
        if not match:
            break  # CUDA itself ignores everything after the first entry that it does not know
        chosen.append(match[0])
    return tuple(chosen)


def _read_gpu(pynvml, index: int) -> tuple[Gpu, str]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    gpu = Gpu(
        index=index,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )
    return gpu, str(pynvml.nvmlDeviceGetUUID(handle))
