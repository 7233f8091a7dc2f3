"""CUDA devices, and AMD's, which torch's builds for ROCm access by the same name (`torch.version.hip`).

torch is imported in the methods: a launcher uses this type in a process without torch.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from accel_nb.runtime.devices.base import DeviceMemory, DeviceType, Event, Stream
from accel_nb.runtime.process.environment import visible_gpus
from accel_nb.runtime.process.hardware import find_gpus, torch_cuda_version, why_unusable

if TYPE_CHECKING:
    import torch

_FIRST_CAPABILITY_WITH_BF16 = (8, 0)


class Cuda(DeviceType):
    """GPUs through `torch.cuda`: of NVIDIA, and of AMD under ROCm."""

    name = "cuda"
    trains_by_default: ClassVar[bool] = True
    one_per_worker: ClassVar[bool] = True
    has_streams: ClassVar[bool] = True
    pins_memory: ClassVar[bool] = True
    backend: ClassVar[str] = "nccl"  # ROCm's RCCL has this name too
    backend_sends_host_tensors: ClassVar[bool] = False
    in_collectives: ClassVar[bool] = True

    def count(self) -> int:
        """Count the devices that are visible to this process."""
        return _cuda().device_count()

    def is_available(self) -> bool:
        """Return whether torch is a build for GPUs and the driver works."""
        return _cuda().is_available()

    @property
    def is_rocm(self) -> bool:
        """Whether torch was built for ROCm."""
        import torch

        return torch.version.hip is not None

    def why_unusable(self) -> list[str]:
        """Return the reason, and what to do, for each visible GPU that this build of torch cannot use."""
        cuda = torch_cuda_version()
        return [why for gpu in find_gpus() if (why := why_unusable(gpu, cuda)) is not None]

    def visible_variables(self, first: int, count: int) -> dict[str, str]:
        """Return ``CUDA_VISIBLE_DEVICES`` for some of the visible GPUs; ROCm reads it as well."""
        visible = visible_gpus() or [str(gpu.index) for gpu in find_gpus()]
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + count])}

    def make_current(self, device: torch.device) -> torch.device:
        """Make a GPU the current one, so that ``"cuda"`` without an index refers to it."""
        import torch

        if device.index is None:
            device = torch.device(self.name, torch.cuda.current_device())
        torch.cuda.set_device(device)
        return device

    def memory(self, device: torch.device | str) -> DeviceMemory:
        """Measure a GPU's memory, and the part of it that torch's allocator holds."""
        cuda = _cuda()
        free, total = cuda.mem_get_info(device)
        return DeviceMemory(cuda.memory_allocated(device), cuda.memory_reserved(device), free, total)

    def load(self, device: torch.device | str) -> dict[str, float]:
        """Return utilization, power and temperature, as far as NVML (AMD SMI under ROCm) measures them."""
        cuda = _cuda()
        sensors = {
            "GPU utilization (%)": cuda.utilization,
            "GPU power (W)": lambda device: cuda.power_draw(device) / 1000,
            "GPU temperature (C)": cuda.temperature,
        }
        measured: dict[str, float] = {}
        for name, read in sensors.items():
            # The libraries raise their own errors: not installed, not permitted, no such sensor, or a part of a GPU.
            with suppress(Exception):
                measured[name] = float(read(device))
        return measured

    def peak_bytes(self, device: torch.device | str) -> int:
        """Return the peak bytes of tensors."""
        return _cuda().max_memory_allocated(device)

    def has_real_bf16(self, device: torch.device | str) -> bool:
        """Return whether the compute capability includes bfloat16; every GPU under ROCm supports it.

        `torch.cuda.is_bf16_supported` counts emulation too, which is slower than float32.
        """
        return _cuda().get_device_capability(device) >= _FIRST_CAPABILITY_WITH_BF16

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of a GPU's generator, on the CPU."""
        return _cuda().get_rng_state(device).cpu()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Set a GPU's generator."""
        _cuda().set_rng_state(state, device)

    def allocator_snapshot(self) -> list[dict[str, Any]]:
        """Return segments and blocks of torch's caching allocator, without the history of allocations."""
        snapshot: Any = _cuda().memory_snapshot
        if "include_traces" in inspect.signature(snapshot).parameters:
            return snapshot(include_traces=False)
        return snapshot()

    def empty_cache(self) -> None:
        """Return unused cached memory to the GPU."""
        _cuda().empty_cache()

    def shares_host_memory(self, device: torch.device | str) -> bool:
        """Return whether the GPU is integrated into the CPU."""
        return bool(_cuda().get_device_properties(device).is_integrated)

    def compute_capability(self, device: torch.device | str) -> tuple[int, int]:
        """Return the compute capability; under ROCm the number that AMD assigns."""
        return _cuda().get_device_capability(device)

    def device_name(self, device: torch.device | str) -> str:
        """Return the product's name."""
        return _cuda().get_device_name(device)

    def synchronize(self, device: torch.device | str) -> None:
        """Wait for all streams of a GPU."""
        _cuda().synchronize(device)

    def new_stream(self, device: torch.device) -> Stream:
        """Return a new stream."""
        return _cuda().Stream(device)

    def current_stream(self, device: torch.device) -> Stream:
        """Return the calling thread's current stream."""
        return _cuda().current_stream(device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which a stream is the current one."""
        return _cuda().stream(stream)

    def new_event(self) -> Event:
        """Return an event without timing."""
        return _cuda().Event()

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Prevent reuse of a deleted tensor's memory until a stream has finished its use of the tensor."""
        tensor.record_stream(stream)


def _cuda() -> Any:
    import torch

    return torch.cuda
