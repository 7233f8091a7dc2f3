"""What the toolkit needs from a type of device. No torch at import: launchers use it too."""

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

    ``allocated`` is in live tensors, ``reserved`` is held by the process in all, ``free`` and ``total`` are the
    device's own. With ``is_of_process`` the resident memory of the process stands for both of the first two, and
    ``free`` and ``total`` are the machine's.
    """

    allocated: int
    reserved: int
    free: int
    total: int
    is_of_process: bool = False


class Event(Protocol):
    """A position in a stream, as `torch.cuda.Event`."""

    def record(self) -> None:
        """Record the present end of the current stream."""
        ...

    def query(self) -> bool:
        """Whether the device has reached the position; does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached the position."""
        ...


class Stream(Protocol):
    """A queue of work on a device, as `torch.cuda.Stream`."""

    def record_event(self) -> Event:
        """Return an event at the present end of the queue."""
        ...

    def wait_event(self, event: Any) -> None:
        """Run what is queued from now on after an event; the process does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has run all that is queued."""
        ...


class DeviceType(ABC):
    """A type of device, such as all CUDA devices: facts as attributes, questions about one device as methods.

    The defaults fit a device of which torch offers no more than tensors: no streams, no page-locked memory, and
    collectives over host memory. A type of another package is a subclass that is registered as an entry point of the
    group ``accel_nb.devices``, under the name that `torch.device.type` has for it.
    """

    name: str
    """What `torch.device.type` is for a device of this type."""

    is_host: ClassVar[bool] = False
    """Whether tensors are in the memory of this process and computed in the calling thread."""

    trains_by_default: ClassVar[bool] = False
    """Whether training uses a device of this type by default, where there is one."""

    runs_strategies_of: ClassVar[str | None] = None
    """Another type: a strategy that declares that one runs on this one too."""

    one_per_worker: ClassVar[bool] = False
    """Whether each worker owns one device, and a launcher chooses which devices are visible to a process."""

    has_streams: ClassVar[bool] = False
    """Whether copies can run beside the computation: streams, events and page-locked memory."""

    pins_memory: ClassVar[bool] = False
    """Whether page-locked host memory makes copies to the device faster."""

    has_addresses: ClassVar[bool] = True
    """Whether tensors have storages with addresses, by which shared memory is recognized."""

    backend: ClassVar[str] = "gloo"
    """The default of `torch.distributed` for this type."""

    backend_sends_host_tensors: ClassVar[bool] = True
    """Whether the default backend sends tensors of the CPU too."""

    in_collectives: ClassVar[bool] = False
    """Whether torch's own backends send tensors of this type; others are sent as a copy on the CPU."""

    @abstractmethod
    def count(self) -> int:
        """Count the devices visible to this process, without making a context; 0 where torch cannot use them."""

    @abstractmethod
    def memory(self, device: torch.device | str) -> DeviceMemory:
        """Measure a device's memory; does not wait for the device."""

    @abstractmethod
    def has_real_bf16(self, device: torch.device | str) -> bool:
        """Whether a device computes bfloat16 in hardware, or at least no slower than torch's CPU kernels do."""

    @abstractmethod
    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of a device's own generator, on the CPU."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Set a device's own generator to what `get_rng_state` returned."""

    def is_available(self) -> bool:
        """Whether torch can use a device of this type here."""
        return self.count() > 0

    def why_unusable(self) -> list[str]:
        """Return why devices of this type that are there cannot be used and what to do, one line each."""
        return []

    def visible_variables(self, first: int, count: int) -> dict[str, str]:
        """Return the environment variables with which a process sees only some of the devices visible here."""
        return {}

    def make_current(self, device: torch.device) -> torch.device:
        """Make a device the current one of this process, and return it with its number where it has one."""
        return device

    def note_opened(self) -> None:
        """Record that this process has opened a device of this type, where torch does not open it by itself."""

    def seed_beside_torch(self, seed: int) -> None:
        """Seed the generators of open devices that `torch.manual_seed` does not reach."""

    def peak_bytes(self, device: torch.device | str) -> int | None:
        """Return the most bytes that tensors have held since the process started; None where torch does not count."""
        return None

    def allocator_snapshot(self) -> list[dict[str, Any]] | None:
        """Return segments and blocks of torch's allocator for all devices, without history; None without one."""
        return None

    def empty_cache(self) -> None:
        """Return memory that torch's allocator keeps for later tensors to the device."""

    def shares_host_memory(self, device: torch.device | str) -> bool:
        """Whether the device's memory is a part of the machine's."""
        return self.is_host

    def compute_capability(self, device: torch.device | str) -> tuple[int, int] | None:
        """Return CUDA's compute capability; None for other devices."""
        return None

    def device_name(self, device: torch.device | str) -> str:
        """Return the product's name, or else that of the type."""
        return self.name

    def synchronize(self, device: torch.device | str) -> None:
        """Wait until the device has run all that is queued."""

    def new_stream(self, device: torch.device) -> Stream:
        """Return a stream beside the current one. Only where `has_streams`."""
        raise NotImplementedError(f"a device of type {self.name} has no streams")

    def current_stream(self, device: torch.device) -> Stream:
        """Return the calling thread's current stream. Only where `has_streams`."""
        raise NotImplementedError(f"a device of type {self.name} has no streams")

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that queues work on a stream. Only where `has_streams`."""
        raise NotImplementedError(f"a device of type {self.name} has no streams")

    def new_event(self) -> Event:
        """Return an event that is not recorded yet. Only where `has_streams`."""
        raise NotImplementedError(f"a device of type {self.name} has no events")

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of a deleted tensor from being used again until a stream is done with it."""
