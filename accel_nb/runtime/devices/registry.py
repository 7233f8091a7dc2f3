"""The `DeviceType` of each device. Does not import torch; a type's module is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

from accel_nb.config.installed import installed_entry_points
from accel_nb.runtime.devices.base import DeviceType

if TYPE_CHECKING:
    import torch

GROUP = "accel_nb.devices"
"""The group of entry points that registers types of other packages."""

_BUILT_IN = {"cpu": "Cpu", "cuda": "Cuda", "xla": "Xla"}
"""Classes by the name of the type, which is the name of the module too."""

_loaded: dict[str, DeviceType] = {}


def device_type(device: torch.device | str) -> DeviceType:
    """Return the type of a device such as ``"cuda:1"``; torch's generic interfaces are used for unregistered types."""
    name = device.partition(":")[0] if isinstance(device, str) else device.type
    return _loaded.get(name) or _load(name)


def default_type() -> DeviceType:
    """Return the type that training uses by default: the first available one, else the CPU."""
    return next((kind for kind in available_types() if kind.trains_by_default), device_type("cpu"))


def available_types() -> Iterator[DeviceType]:
    """Yield the available types other than the CPU: CUDA, registered ones, torch's current accelerator."""
    seen = set[str]()
    if (kind := device_type("cuda")).is_available():
        seen.add(kind.name)
        yield kind
    for name in _registered():
        if name not in seen and (kind := device_type(name)).is_available():
            seen.add(name)
            yield kind
    import torch

    # The availability of CUDA and of registered types was checked above.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is not None and found.type not in {"cpu", "cuda", *_registered()}:
        yield device_type(found)


def type_of_backend(backend: str) -> DeviceType:
    """Return the first available type whose default backend this is, and sends its tensors only; else the CPU.

    NCCL is such a backend.
    """
    kinds = (kind for kind in available_types() if not kind.backend_sends_host_tensors and kind.backend == backend)
    return next(kinds, device_type("cpu"))


def loaded_types() -> Iterator[DeviceType]:
    """Yield the types that this process has looked up."""
    return iter(tuple(_loaded.values()))


def is_meta(device: torch.device) -> bool:
    """Return whether a device is torch's ``meta``, whose tensors have shapes but no content."""
    return device.type == "meta"


def _load(name: str) -> DeviceType:
    if name in _BUILT_IN:
        loaded = getattr(import_module(f"accel_nb.runtime.devices.{name}"), _BUILT_IN[name])()
    elif name in _registered():
        loaded = _registered()[name].load()()
    else:
        from accel_nb.runtime.devices.accelerator import GenericDevice

        loaded = GenericDevice(name)
    return _loaded.setdefault(name, loaded)


@cache
def _registered() -> dict[str, EntryPoint]:
    """Return the registered types by name."""
    return {point.name: point for point in installed_entry_points(GROUP) if point.name not in _BUILT_IN}
