"""Assignment of devices to workers, from the options, the devices of the machine and the reservations of other runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from accel_nb.config import Config
from accel_nb.errors import ConfigError, PoolError
from accel_nb.pool.engine import WorkerSpec
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.process.hardware import (
    count_tpu_chips,
    find_gpus,
    num_usable_cores,
    torch_cuda_version,
    why_no_xla,
    why_unusable,
)
from accel_nb.runtime.process.platforms import find_tpu


def uses_gpus(gpus: int | Literal["all"] | None, cpus: int | None) -> bool:
    """Return whether `assign_devices` would use GPUs; an explicit number counts even if this machine has none."""
    return cpus is None and (gpus is not None or bool(find_gpus()))


def assign_devices(
    gpus: int | Literal["all"] | None,
    cpus: int | None,
    tpus: int | Literal["all"] | None = None,
    *,
    num_reserved: int = 0,
) -> tuple[WorkerSpec, ...]:
    """Return one spec for each worker; without options one for each visible GPU, or a single one for a TPU or the CPU.

    Other runs use the first ``num_reserved`` of the visible GPUs. Raise ConfigError if more GPUs are requested than
    are visible and free, if torch cannot run on one of them, or if it cannot run on the TPU to be used.
    """
    if cpus is not None:
        return (WorkerSpec("cpu", max(1, num_usable_cores() // cpus)),) * cpus
    if tpus is not None:
        return (_tpu_worker(tpus),)
    found = find_gpus()
    visible = len(found)
    if gpus is None and visible == 0:
        return (WorkerSpec("cpu", num_usable_cores()) if find_tpu() is None else _tpu_worker("all"),)
    free = visible - num_reserved
    count = free if gpus in (None, "all") else int(gpus)
    if visible and num_reserved and (count == 0 or count > free):
        raise ConfigError(
            f"{gpus or 'all'} GPUs were requested, {free} of {visible} are free and other cells or launches use the "
            "rest; wait until they have ended, or give each launch its own number of processes"
        )
    if count == 0 or count > visible:
        raise ConfigError(
            f"--gpus {gpus} was requested and {visible or 'no'} GPU{'s are' if visible != 1 else ' is'} visible; "
            f"ask for at most {visible}, or use --cpus N"
            if visible
            else f"--gpus {gpus} was requested and no GPU is visible; use --cpus N"
        )
    if problems := [
        why for gpu in found[num_reserved : num_reserved + count] if (why := why_unusable(gpu, torch_cuda_version()))
    ]:
        raise ConfigError(problems)
    threads = max(1, num_usable_cores() // count)
    return tuple(WorkerSpec(f"cuda:{index}", threads) for index in range(count))


def assign_workers(config: Config, *, lost: Collection[int] = (), num_reserved: int = 0) -> tuple[WorkerSpec, ...]:
    """Return one spec for each worker of a run: on this machine, or on the engine's nodes without the lost ones."""
    if config.engine.kind == "local":
        return assign_devices(gpus=config.gpus, cpus=config.cpus, tpus=config.tpus, num_reserved=num_reserved)
    return assign_nodes(config.gpus, config.cpus, [node for node in range(config.engine.nodes) if node not in lost])


def assign_nodes(gpus: int | Literal["all"] | None, cpus: int | None, nodes: Sequence[int]) -> tuple[WorkerSpec, ...]:
    """Return the specs of the workers on the nodes: the same number on each, since their devices are not known here.

    Workers on the processor share the cores of a node, which are assumed to be as many as here.
    """
    count = cpus if cpus is not None else int(gpus or 1)
    threads = max(1, num_usable_cores() // count)
    devices = ["cpu"] * count if cpus is not None else [f"cuda:{index}" for index in range(count)]
    return tuple(WorkerSpec(device, threads, node) for node in nodes for device in devices)


def _tpu_worker(tpus: int | Literal["all"]) -> WorkerSpec:
    """Return the spec of the worker that uses all chips of the TPU."""
    tpu, chips = find_tpu(), count_tpu_chips()
    if tpu is None:
        raise ConfigError(f"--tpus {tpus} was requested and no TPU is visible; use --gpus N or --cpus N")
    if (why := why_no_xla()) is not None:
        raise ConfigError(f"{tpu}: {why}; or use --cpus N to train on the processor")
    if tpus not in ("all", chips):
        there = f"{chips} are there" if chips else "how many are there is not known before the device is opened"
        raise ConfigError(f"--tpus {tpus}: one worker drives all chips of the {tpu}, and {there}; use --tpus all")
    return WorkerSpec("xla", num_usable_cores())


class DeviceReservations:
    """The GPUs of concurrent runs: each reserves a contiguous range; may be used in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reserved: dict[int, int] = {}

    @contextmanager
    def reserving_next(
        self, assign: Callable[[int], tuple[WorkerSpec, ...]]
    ) -> Iterator[tuple[tuple[WorkerSpec, ...], int]]:
        """Reserve GPUs for the block; yield the specs of ``assign(number of reserved GPUs)`` and their first GPU."""
        with self._lock:
            first = max((first + count for first, count in self._reserved.items()), default=0)
            specs = assign(first)
            count = _num_gpus(specs)
            if count:
                self._reserved[first] = count
        try:
            yield specs, first
        finally:
            self._release(first, count)

    def reserve_first(self, specs: Sequence[WorkerSpec]) -> Callable[[], None]:
        """Reserve the first GPUs, one for each worker on a GPU; return a function that releases them.

        Raise PoolError if one of them is reserved already.
        """
        count = _num_gpus(specs)
        with self._lock:
            first = min(self._reserved, default=count)
            if first < count:
                fewer = f", or use --gpus {first}" if first else ""
                raise PoolError(f"GPU {first} is in use by a launch that runs now; wait until it has ended{fewer}")
            if count:
                self._reserved[0] = count
        return lambda: self._release(0, count)

    def _release(self, first: int, count: int) -> None:
        if count:
            with self._lock:
                del self._reserved[first]


def _num_gpus(specs: Sequence[WorkerSpec]) -> int:
    return sum(device_type(spec.device).one_per_worker for spec in specs)
