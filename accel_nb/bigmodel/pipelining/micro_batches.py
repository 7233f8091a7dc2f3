"""Pipeline of micro-batches over the devices of a device map, in one process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from accel_nb.bigmodel.offload.dispatch import get_dispatch_record
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.tensors.nested import concat_batches, first_batch_size, slice_batch


def pipeline_devices(model: nn.Module, num_chunks: int | None = None) -> nn.Module:
    """Make a dispatched model process each batch in micro-batches, on all its devices at the same time.

    A batch (the first dim of the first tensor given) is cut into ``num_chunks`` parts (None: two for each device); the
    outputs are joined along that dim, so the model must return one value for each sample. Results may round differently
    than for the whole batch. Each part runs in a separate thread; the order of random draws is not deterministic.
    `remove_hook_from_submodules` undoes it, and a second call replaces it. Raises `MisuseError` for a model that is not
    dispatched over several devices; so does a forward whose batch normalization is in training mode.
    """
    handle = get_dispatch_record(model)
    devices = list(dict.fromkeys(handle.compute_devices.values()))
    if len(devices) < 2:
        raise MisuseError(
            f"the model computes on {devices[0]} alone; a pipeline needs a device map with several devices"
        )
    if num_chunks is not None and (type(num_chunks) is not int or num_chunks < 1):
        raise ConfigError(f"num_chunks is {num_chunks!r}; give a whole number from 1")
    locks = _DeviceLocks(devices)
    handle.begin_pipeline()
    for name, device in handle.compute_devices.items():
        handle.wrap(model.get_submodule(name), functools.partial(_with_device, locks, device))
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    handle.wrap(model, functools.partial(_in_micro_batches, locks, num_chunks or 2 * len(devices), norms))
    return model


class _DeviceLocks:
    """A lock for each device, so that it computes one micro-batch at a time; they start in the batch's order."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self._locks = {device: threading.Lock() for device in devices}
        self._own = threading.local()

    @contextmanager
    def part(self, before: threading.Event, started: threading.Event) -> Iterator[None]:
        """Run one part in this thread after event ``before``; set ``started`` when it has acquired its first device."""
        before.wait()
        self._own.started = started
        try:
            yield
        finally:
            self.release_device()
            started.set()

    def acquire_device(self, device: torch.device) -> None:
        """Release this thread's device and acquire another."""
        if getattr(self._own, "device", None) != device:
            self.release_device()
            self._locks[device].acquire()
            self._own.device = device
            if (started := getattr(self._own, "started", None)) is not None:
                started.set()

    def release_device(self) -> None:
        """Release this thread's device."""
        device = getattr(self._own, "device", None)
        if device is not None:
            self._own.device = None
            self._locks[device].release()


def _with_device(locks: _DeviceLocks, device: torch.device, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that first acquires its device."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        locks.acquire_device(device)
        return inner(*args, **kwargs)

    return forward


def _in_micro_batches(
    locks: _DeviceLocks, num_chunks: int, norms: Sequence[nn.Module], inner: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a forward that runs ``inner`` on parts of the batch, each in a thread; ``norms`` need whole batches."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        size = first_batch_size((args, kwargs))
        if size is None or size < 2:
            try:
                return inner(*args, **kwargs)
            finally:
                locks.release_device()
        count = min(num_chunks, size)
        if count > 1 and any(norm.training for norm in norms):
            raise MisuseError(
                "batch normalization in training mode computes statistics of the whole batch, and a pipeline computes "
                "parts of it; call eval() on the model or on these layers, or pipeline_devices(model, num_chunks=1)"
            )
        bounds = [size * at // count for at in range(count + 1)]
        modes = _current_modes(locks.devices)
        started = [threading.Event() for _ in bounds]
        started[0].set()

        def run(number: int, start: int, stop: int) -> Any:
            with ExitStack() as stack:
                stack.enter_context(locks.part(started[number], started[number + 1]))
                for mode in modes:
                    stack.enter_context(mode())
                own_args, own_kwargs = slice_batch((args, kwargs), start, stop)
                return inner(*own_args, **own_kwargs)

        with ThreadPoolExecutor(min(count, len(locks.devices) + 1), "accel_nb-part") as pool:
            return concat_batches(list(pool.map(run, range(count), bounds[:-1], bounds[1:])))

    return forward


def _current_modes(devices: Sequence[torch.device]) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Return context managers that apply this thread's modes in another: gradients, autocast, streams."""
    modes: list[Callable[[], AbstractContextManager[Any]]] = [
        functools.partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    kinds = [kind for kind in dict.fromkeys(device.type for device in devices) if torch.is_autocast_enabled(kind)]
    modes += [functools.partial(torch.autocast, kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    for device in devices:
        if (kind := device_type(device)).has_streams:
            modes.append(functools.partial(kind.on_stream, kind.current_stream(device)))
    return modes
