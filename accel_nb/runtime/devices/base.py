"""The interface of device types. Does not import torch, as launchers use it too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device in bytes.

    ``allocated`` is the memory of live tensors, ``reserved`` all that the process uses; ``free`` and ``total`` are the
    device's. With ``is_of_process`` the first two are the resident memory of the process, and the last two are the
    machine's.
    """

    allocated: int
    reserved: int
    free: int
    total: int
    is_of_process: bool = False


class Event(Protocol):
    """A position in a stream, as `torch.cuda.Event`."""

    def record(self) -> None:
        """Record the current end of the current stream."""
        ...

    def query(self) -> bool:
        """Return whether the device has reached the position, without waiting."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached the position."""
        ...


class Stream(Protocol):
    """A queue of work on a device, as `torch.cuda.Stream`."""

    def record_event(self) -> Event:
        """Return an event at the current end of the queue."""
        ...

    def wait_event(self, event: Any) -> None:
        """Make work that is queued from now on wait for an event; the process does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        ...


class DeviceType(ABC):
    """A type of device, such as CUDA: attributes describe the type, methods one device.

    The defaults describe a device for which torch has tensors only: no streams, no page-locked memory, and collectives
    over host memory. Another package registers a type as a subclass, by an entry point of the group
    ``accel_nb.devices`` whose name is the `torch.device.type`.
    """

    name: str
    """The `torch.device.type` of devices of this type."""

    is_host: ClassVar[bool] = False
    """Whether tensors are in the memory of this process and computed in the calling thread."""

    trains_by_default: ClassVar[bool] = False
    """Whether training uses a device of this type by default, if there is one."""

    runs_strategies_of: ClassVar[str | None] = None
    """Another type whose strategies also run on this type."""

    one_per_worker: ClassVar[bool] = False
    """Whether each worker owns one device, and a launcher chooses which devices are visible to a process."""

    has_streams: ClassVar[bool] = False
    """Whether copies can run concurrently with computation: streams, events and page-locked memory."""

    pins_memory: ClassVar[bool] = False
    """Whether page-locked host memory makes copies to the device faster."""

    has_addresses: ClassVar[bool] = True
    """Whether tensors have storages with addresses, by which shared memory is recognized."""

    backend: ClassVar[str] = "gloo"
    """The default backend of `torch.distributed` for this type."""

    backend_sends_host_tensors: ClassVar[bool] = True
    """Whether the default backend sends CPU tensors too."""

    in_collectives: ClassVar[bool] = False
    """Whether torch's backends send tensors of this type; tensors of other types are copied to the CPU first."""

    @abstractmethod
    def count(self) -> int:
        """Count the devices visible to this process, without creating a context; 0 if torch cannot use them."""

    @abstractmethod
    def memory(self, device: torch.device | str) -> DeviceMemory:
        """Measure a device's memory without waiting for the device."""

    @abstractmethod
    def has_real_bf16(self, device: torch.device | str) -> bool:
        """Return whether a device computes bfloat16 in hardware, or at least no slower than torch's CPU kernels do."""

    @abstractmethod
    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of a device's own generator, on the CPU."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Set a device's own generator to a state that `get_rng_state` has returned."""

    def load(self, device: torch.device | str) -> dict[str, float]:
        """Return the values of a device's sensors, by name with unit, such as ``GPU utilization (%)``; may be empty."""
        return {}

    def is_available(self) -> bool:
        """Return whether torch can use a device of this type on this machine."""
        return self.count() > 0

    def why_unusable(self) -> list[str]:
        """Return the reasons why existing devices of this type cannot be used, and what to do, one line each."""
        return []

    def visible_variables(self, first: int, count: int) -> dict[str, str]:
        """Return the environment variables that restrict a process to ``count`` visible devices from ``first`` on."""
        return {}

    def make_current(self, device: torch.device) -> torch.device:
        """Make a device the current one of this process; return it with its index if the type has indices."""
        return device

    def note_opened(self) -> None:
        """Record that this process has opened a device of this type, if torch does not open it automatically."""

    def seed_beside_torch(self, seed: int) -> None:
        """Seed the generators of open devices that `torch.manual_seed` does not reach."""

    def peak_bytes(self, device: torch.device | str) -> int | None:
        """Return the peak bytes of tensors since the process started; None if torch does not count them."""
        return None

    def allocator_snapshot(self) -> list[dict[str, Any]] | None:
        """Return segments and blocks of torch's allocator for all devices, without history; None without one."""
        return None

    def empty_cache(self) -> None:
        """Return memory that torch's allocator keeps for later tensors to the device."""

    def shares_host_memory(self, device: torch.device | str) -> bool:
        """Return whether the device uses the machine's memory."""
        return self.is_host

    def compute_capability(self, device: torch.device | str) -> tuple[int, int] | None:
        """Return CUDA's compute capability; None for other devices."""
        return None

    def device_name(self, device: torch.device | str) -> str:
        """Return the product's name, or the type's name if it is unknown."""
        return self.name

    def synchronize(self, device: torch.device | str) -> None:
        """Wait until the device has finished all queued work."""

    def new_stream(self, device: torch.device) -> Stream:
        """Return a new stream; only if `has_streams`."""
        raise NotImplementedError(f"a device of type {self.name} has no streams")

    def current_stream(self, device: torch.device) -> Stream:
        """Return the calling thread's current stream; only if `has_streams`."""
        raise NotImplementedError(f"a device of type {self.name} has no streams")

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that queues work on a stream; only if `has_streams`."""
        raise NotImplementedError(f"a device of type {self.name} has no streams")

    def new_event(self) -> Event:
        """Return an event that is not recorded yet; only if `has_streams`."""
        raise NotImplementedError(f"a device of type {self.name} has no events")

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Prevent reuse of a deleted tensor's memory until a stream has finished its use of the tensor."""
