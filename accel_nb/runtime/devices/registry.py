"""Find the `DeviceType` of a device. No torch at import; a type's module is imported when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from accel_nb.runtime.devices.base import DeviceType

if TYPE_CHECKING:
    import torch

GROUP = "accel_nb.devices"
"""The group of entry points that registers types of other packages."""

_BUILT_IN = {"cpu": "Cpu", "cuda": "Cuda", "xla": "Xla"}
"""Classes by the name of the type, which is the name of the module too."""

_known: dict[str, DeviceType] = {}


def device_type(device: torch.device | str) -> DeviceType:
    """Return the type of a device such as ``"cuda:1"``; one that is not registered is what torch makes of its name."""
    name = device.partition(":")[0] if isinstance(device, str) else device.type
    return _known.get(name) or _load(name)


def default_type() -> DeviceType:
    """Return the type that training uses by default: the first available one, else the CPU."""
    return next((kind for kind in available_types() if kind.trains_by_default), device_type("cpu"))


def available_types() -> Iterator[DeviceType]:
    """Yield the types beside the CPU that this process can compute on: CUDA, registered ones, torch's current one."""
    seen = set[str]()
    if (kind := device_type("cuda")).is_available():
        seen.add(kind.name)
        yield kind
    for name in _registered():
        if name not in seen and (kind := device_type(name)).is_available():
            seen.add(name)
            yield kind
    import torch

    # CUDA and what is registered have answered for themselves.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is not None and found.type not in {"cpu", "cuda", *_registered()}:
        yield device_type(found)


def type_of_backend(backend: str) -> DeviceType:
    """Return the type that a backend of `torch.distributed` is the default of; the CPU where it serves several."""
    kinds = (kind for kind in available_types() if not kind.backend_sends_host_tensors and kind.backend == backend)
    return next(kinds, device_type("cpu"))


def loaded_types() -> Iterator[DeviceType]:
    """Yield the types that this process has used."""
    return iter(tuple(_known.values()))


def is_meta(device: torch.device) -> bool:
    """Whether a device is torch's ``meta``, whose tensors have shapes and no content."""
    return device.type == "meta"


def _load(name: str) -> DeviceType:
    if name in _BUILT_IN:
        made = getattr(import_module(f"accel_nb.runtime.devices.{name}"), _BUILT_IN[name])()
    elif name in _registered():
        made = _registered()[name].load()()
    else:
        from accel_nb.runtime.devices.accelerator import Accelerator

        made = Accelerator(name)
    return _known.setdefault(name, made)


@cache
def _registered() -> dict[str, EntryPoint]:
    """Return the registered types by name. Reading them opens a file of every installed package: once is enough."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _BUILT_IN}
