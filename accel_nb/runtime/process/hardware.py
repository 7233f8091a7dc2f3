"""Detection of this machine's hardware, without torch and without a device context."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from accel_nb.runtime.process.environment import get_variable, visible_gpus

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""One of these files exists if a driver is installed; the second one under WSL."""

_TPU_VENDOR = "0x1ae0"
_TPU_DEVICES = frozenset({"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
"""PCI ids of TPU chips, as in torch_xla; the vendor has other devices too, such as network adapters."""


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
        """Whether the hardware computes bf16 (compute capability 8.0 and newer), without emulation."""
        return self.capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class Machine:
    """Processors, memory and devices of this machine; sizes in bytes."""

    num_cores: int
    total_bytes: int
    free_bytes: int
    shm_free_bytes: int
    disk_free_bytes: int | None
    """None if the working folder was deleted."""
    gpus: tuple[Gpu, ...]
    gpu_problems: tuple[str, ...] = ()
    """Errors of GPUs that could not be read, one line each."""


def inspect_machine() -> Machine:
    """Return the current state of this machine; GPUs are read by NVML, without a device context."""
    memory = psutil.virtual_memory()
    gpus, problems = inspect_gpus()
    return Machine(
        num_cores=num_usable_cores(),
        total_bytes=memory.total,
        free_bytes=memory.available,
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        disk_free_bytes=_free_disk_bytes(),
        gpus=gpus,
        gpu_problems=problems,
    )


def _free_disk_bytes() -> int | None:
    """Return the free bytes on the disk of the working folder; None if the folder was deleted."""
    try:
        return shutil.disk_usage(os.getcwd()).free
    except FileNotFoundError:
        return None


@cache
def count_tpu_chips(bus: str = "/sys/bus/pci/devices") -> int:
    """Count the TPU chips on the PCI bus, by the folder of each device in ``bus``."""
    found = 0
    for device in Path(bus).glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:  # not every device has these files
            continue
        found += vendor == _TPU_VENDOR and kind in _TPU_DEVICES
    return found


def num_usable_cores() -> int:
    """Count the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def missing_compiler() -> str | None:
    """Return the name of the C++ compiler that torch.compile calls if it is not installed; None if it is."""
    compiler = get_variable("CXX", "") or "g++"
    return compiler if shutil.which(compiler) is None else None


def torch_cuda_version() -> tuple[int, int] | None:
    """Return the version of CUDA that the installed torch was built for, read from its files; None for a CPU build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=\n]*= '(\d+)\.(\d+)'", text, re.MULTILINE)
    return None if found is None else (int(found[1]), int(found[2]))


def why_no_xla(torch: str | None = None, torch_xla: str | None = None) -> str | None:
    """Return the reason if torch_xla cannot run with the installed torch, and what to do; None if it can.

    A build of torch_xla needs one minor version of torch, which its metadata does not state: with another it fails to
    load. The versions default to the installed ones.
    """
    # Each new accelerator calls this, and reading a version parses all metadata of a package: check for it first.
    if torch_xla is None and find_spec("torch_xla") is not None:
        torch_xla = _version_of("torch_xla")
    if torch_xla is None:
        return (
            "torch_xla is not installed: in an environment of its own, since its torch is an older one, "
            "pip install 'torch==2.9.*' 'torch_xla==2.9.*' (on a TPU 'torch_xla[tpu]==2.9.*')"
        )
    torch, needed_minor = torch or _version_of("torch"), _minor(torch_xla)
    if torch is None or _minor(torch) != needed_minor:
        return (
            f"torch_xla {torch_xla} runs with torch {needed_minor} only, and torch {torch or '(none)'} is installed: "
            f"pip install 'torch=={needed_minor}.*' in an environment of its own, or the torch_xla of this torch"
        )
    return None


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def why_unusable(gpu: Gpu, cuda: tuple[int, int] | None) -> str | None:
    """Return the reason if torch built for this version of CUDA cannot use a device, and what to do; None if it can.

    PyTorch's builds for CUDA 12.8 and newer need at least compute capability 7.5, older builds at least 5.0.
    """
    if cuda is None:
        return f"GPU {gpu.index} ({gpu.name}): torch is a build for CPUs; install a CUDA build, or use --cpus N"
    oldest = (7, 5) if cuda >= (12, 8) else (5, 0)
    if gpu.capability >= oldest:
        return None
    return (
        f"GPU {gpu.index} ({gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}) cannot run this "
        f"torch, whose build for CUDA {cuda[0]}.{cuda[1]} begins with {oldest[0]}.{oldest[1]}: choose another "
        "accelerator (on Kaggle: GPU T4 x2), install a build for CUDA 12.6, or use --cpus N"
    )


def find_gpus() -> tuple[Gpu, ...]:
    """List the CUDA devices that are visible to torch, in its order; empty without a driver."""
    return inspect_gpus()[0]


def inspect_gpus() -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """List the CUDA devices that are visible to torch, and errors of devices that could not be read."""
    if not any(map(os.path.exists, _DRIVERS)):
        return (), ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), (f"the driver's management library (NVML) cannot be initialized: {error}",)
    try:
        return list_gpus(pynvml, visible_gpus())
    finally:
        pynvml.nvmlShutdown()


def list_gpus(nvml: Any, visible: list[str] | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """List the devices of an initialized management library; ``visible`` as in ``CUDA_VISIBLE_DEVICES``.

    A process can use at most one instance of GPUs that are divided by MIG, and then no whole GPU.
    """
    whole: list[tuple[Gpu, str]] = []
    parts: list[tuple[Gpu, str]] = []
    problems: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            instances = list(_mig_instances(nvml, handle, index))
            parts += instances
            if not instances:
                whole.append(_read_gpu(nvml, handle, index))
        except nvml.NVMLError as error:
            problems.append(f"GPU {index} cannot be read: {error}")
    if visible is None:
        return tuple(gpu for gpu, _ in whole or parts[:1]), tuple(problems)
    chosen: list[Gpu] = []
    for entry in visible:
        if entry.startswith("MIG-"):
            match = [gpu for gpu, uuid in parts if uuid.startswith(entry)]
            return (tuple(chosen) or tuple(match[:1])), tuple(problems)
        match = [gpu for gpu, uuid in whole if entry == str(gpu.index) or uuid.startswith(entry)]
        match = match or [gpu for gpu, _ in parts if entry == str(gpu.index)][: 0 if chosen else 1]
        if not match:
            break  # CUDA ignores everything after the first unknown entry
        chosen.append(match[0])
    return tuple(chosen), tuple(problems)


def _mig_instances(nvml: Any, handle: Any, index: int) -> Iterator[tuple[Gpu, str]]:
    """Yield the MIG instances of a GPU with their UUIDs; none if the GPU is not divided."""
    try:
        mode, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # the device does not support MIG
        return
    if mode != nvml.NVML_DEVICE_MIG_ENABLE:
        return
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except nvml.NVMLError:  # no instance has this index
            continue
        capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        yield _read_gpu(nvml, part, index, capability=capability)


def _read_gpu(nvml: Any, handle: Any, index: int, *, capability: Any = None) -> tuple[Gpu, str]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    gpu = Gpu(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        capability=tuple(capability or nvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )
    return gpu, str(nvml.nvmlDeviceGetUUID(handle))
