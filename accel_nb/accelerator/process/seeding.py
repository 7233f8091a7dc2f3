"""Seeds and random states as functions, for scripts without an accelerator."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import torch

from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.current_world import current_comm, current_world

_TYPES = (*rng.ALL_PARTS, "cuda", "generator")


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False, *, step: int | None = None) -> int:
    """Seed Python, NumPy and torch on all devices, and return the seed that this rank used.

    Args:
        seed: Any whole number.
        device_specific: Use a different stream on each rank, derived from seed and rank; rank 0 uses the seed itself.
        deterministic: Make torch use deterministic algorithms, or raise where it has none, from now on. On CUDA torch
            also needs the variable ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` to be set before the first operation.
        step: Derive the stream from this number too, so that a resumed run draws the same numbers in each step.
    """
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return rng.set_seed(seed, per_rank=current_world() if device_specific else None, step=step)


def checked_types(types: Iterable[str | Enum] | None) -> tuple[str, ...]:
    """Return the names of the generators whose states ranks synchronize at each epoch.

    ``generator`` is left out, since a loader's generator is always synchronized. Raises `MisuseError` for unknown
    names.
    """
    wanted = [str(getattr(name, "value", name)) for name in types or ()]
    _refuse_unknown(wanted)
    return tuple(name for name in wanted if name != "generator")


def synchronize_rng_states(types: Iterable[str] | str = ("torch",), generator: torch.Generator | None = None) -> None:
    """Broadcast rank 0's states of the named generators, in one message; every rank must call.

    ``types`` are ``python``, ``numpy``, ``torch``, ``cuda`` (this rank's device) and ``generator`` (the argument).
    Raises `MisuseError` for other names, for ``cuda`` on a rank without a GPU, and for ``generator`` if there is none.
    """
    wanted = [types] if isinstance(types, str) else list(types)
    _refuse_unknown(wanted)
    if "generator" in wanted and generator is None:
        raise MisuseError(
            "synchronize_rng_states got the type 'generator' without a generator; call "
            "synchronize_rng_states(['generator'], generator)"
        )
    comm = current_comm()
    device = torch.device(comm.world.device)
    if "cuda" in wanted and device_type(device).is_host:
        raise MisuseError(f"this rank trains on {device} and has no CUDA generator; leave 'cuda' out")
    parts: list[rng.Part] = [part for part in rng.ALL_PARTS if part in wanted]
    states = rng.capture(device if "cuda" in wanted else None, parts=parts)
    if generator is not None and "generator" in wanted:
        states["generator"] = generator.get_state().cpu()
    if comm.world.size == 1 or not states:
        return
    received = rng.unpack(comm.broadcast(rng.pack(states), 0), states)
    own = received.pop("generator", None)
    rng.restore(received, device if "cuda" in wanted else None)
    if generator is not None and own is not None:
        generator.set_state(own)


def _refuse_unknown(names: list[str]) -> None:
    unknown = [name for name in names if name not in _TYPES]
    if unknown:
        raise MisuseError(f"there are no random states called {', '.join(unknown)}; there are {', '.join(_TYPES)}")
