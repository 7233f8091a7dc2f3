"""Which devices a run gets: from what was asked for and what the machine has."""

from __future__ import annotations

from typing import Literal

from accel_nb.errors import ConfigError
from accel_nb.pool.engine import WorkerSpec
from accel_nb.runtime.hardware import find_gpus, num_usable_cores


def place_workers(*, gpus: int | Literal["all"] | None, cpus: int | None) -> tuple[WorkerSpec, ...]:
    """Return one spec for each worker; with neither given every visible GPU, else one CPU worker.

    Raises ConfigError when more GPUs are asked for than are visible.
    """
    if cpus is not None:
        return (WorkerSpec("cpu", max(1, num_usable_cores() // cpus)),) * cpus
    visible = len(find_gpus())
    if gpus is None and visible == 0:
        return (WorkerSpec("cpu", num_usable_cores()),)
    count = visible if gpus in (None, "all") else int(gpus)
    if count == 0 or count > visible:
        raise ConfigError(
            f"--gpus {gpus} was asked for and {visible or 'no'} GPU{'s are' if visible != 1 else ' is'} visible; "
            f"ask for at most {visible}, or use --cpus N"
            if visible
            else f"--gpus {gpus} was asked for and no GPU is visible; use --cpus N"
        )
    threads = max(1, num_usable_cores() // count)
    return tuple(WorkerSpec(f"cuda:{index}", threads) for index in range(count))
