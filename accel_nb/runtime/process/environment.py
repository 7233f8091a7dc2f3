"""The process environment: the only module that reads or writes ``os.environ``."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from accel_nb.runtime.world import World
from accel_nb.secrets import names_secret

OPTION_PREFIX = "ACCEL_NB_"
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""It takes effect only when a process starts."""
LAUNCH_STORE = "_ACCEL_NB_STORE"
"""The variable with the inherited descriptor of the store file of a launch; see `launch_store`."""

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_T = TypeVar("_T")
_KEY = re.compile(r"(?i)(?:^|_)(?:api)?(?:key|pat)(?:$|_)")
_MIN_SECRET = 8
"""Shorter values also occur in other strings."""

_OWN_PREFIXES = (OPTION_PREFIX, f"_{OPTION_PREFIX}")
_RANK_VARIABLES = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
    }
)  # fmt: skip

CPU_RANK: Mapping[str, str] = MappingProxyType({"ACCELERATE_USE_CPU": "true"})
"""What accelerate's launcher sets for one of several ranks on the CPU. Without it the package forms no group of CPU
ranks, and each would train alone; with it a single rank would be a group, and models would be wrapped."""


def option_variables() -> dict[str, str]:
    """Return the ``ACCEL_NB_...`` variables, which are the environment layer of the options."""
    return {name: os.environ[name] for name in list(os.environ) if name.startswith(OPTION_PREFIX)}


def get_variable(name: str, default: _T) -> str | _T:
    """Return the value of a variable, or ``default`` if it is not set."""
    return os.environ.get(name, default)


def has_fixed_hashes() -> bool:
    """Return whether this process was started with a fixed hash seed, which its child processes inherit."""
    seed = get_variable("PYTHONHASHSEED", "")
    return seed not in ("", "random") and _variable_at_start("PYTHONHASHSEED") == seed


def _variable_at_start(name: str) -> str | None:
    """Return the value of a variable at the start of the process: later changes have no effect on the interpreter."""
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = (os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0"))
            return next((value for key, _, value in pairs if key == name), None)
    except OSError:
        return None


def get_variables(*names: str) -> dict[str, str]:
    """Return the values of those variables among ``names`` that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def notebook_variables() -> dict[str, str]:
    """Return the variables that a notebook may set: all except this package's and those that describe a rank."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OWN_PREFIXES) and name not in _RANK_VARIABLES
    }


def inherited_variables() -> dict[str, str]:
    """Return the variables that this process was started with, of those that `notebook_variables` returns."""
    with open("/proc/self/environ", "rb") as file:
        entries = file.read().decode(errors="surrogateescape").split("\0")
    pairs = (entry.partition("=") for entry in entries if "=" in entry)
    return {
        name: value for name, _, value in pairs if not name.startswith(_OWN_PREFIXES) and name not in _RANK_VARIABLES
    }


def set_variables(changes: Mapping[str, str | None]) -> None:
    """Set variables; None removes one. Variables that `notebook_variables` leaves out are not changed."""
    for name, value in changes.items():
        if name.startswith(_OWN_PREFIXES) or name in _RANK_VARIABLES:
            continue
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if "TZ" in changes:
        time.tzset()


def zygote_environment() -> dict[str, str]:
    """Return the environment to start a zygote with: this one, with one thread for each math library.

    Forking is safe only in a process with one thread. `restore_threads` undoes this in the workers.
    """
    environment = dict(os.environ)
    for name in _ONE_THREAD:
        if name in environment:
            environment[f"_ACCEL_NB_SAVED_{name}"] = environment[name]
        environment[name] = "1"
    return environment


def restore_threads() -> None:
    """Restore the kernel's thread variables in a forked worker."""
    for name in _ONE_THREAD:
        saved = os.environ.pop(f"_ACCEL_NB_SAVED_{name}", None)
        if saved is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = saved


def all_variables() -> dict[str, str]:
    """Return a copy of the whole environment."""
    return dict(os.environ)


def rank_variables(world: World, *, address: str, port: int, machine: int = 0) -> dict[str, str]:
    """Return the variables that ``torchrun`` sets for a rank; ``machine`` counts from 0."""
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": str(machine),
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def launch_store() -> str | None:
    """Return the path of the anonymous store file of a launch on one machine; None in other processes."""
    descriptor = os.environ.get(LAUNCH_STORE)
    return None if descriptor is None else f"/proc/self/fd/{int(descriptor)}"


def set_rank_variables(world: World, *, node: int = 0, address: str = "127.0.0.1", interface: str = "") -> None:
    """Set the variables of a ``torchrun`` rank in this worker, so that other trainers run in a cell.

    ``address`` is node 0's, ``interface`` the network interface over which this node reaches the others; empty
    if it is not known.
    """
    variables = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": address,
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        **(CPU_RANK if world.device == "cpu" and world.size > 1 else {}),
        "_ACCEL_NB_WORKER_DEVICE": world.device,
    }
    # `update` checks `isinstance` against abstract classes, which writes to memory pages that the worker shares with
    # the zygote, and each such page is then copied.
    for name, value in variables.items():
        os.environ[name] = value


def set_local_rank(world: World) -> None:
    """Set ``LOCAL_RANK`` for libraries that read it; some launchers do not set it."""
    os.environ["LOCAL_RANK"] = str(world.local_rank)


def assigned_device() -> str | None:
    """Return the device that the pool has assigned to this worker; None in other processes."""
    return os.environ.get("_ACCEL_NB_WORKER_DEVICE")


def torchrun_world() -> World | None:
    """Return the world that ``torchrun`` or the pool has set in the variables; None if neither has."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return World(
        rank=rank,
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        device=assigned_device() or "cpu",
    )


def secret_values() -> list[str]:
    """Return the values of variables whose names contain secret, key, token or password, longest first.

    Short values and paths of existing files are left out: in the latter case the secret is in the file.
    """
    found = {os.environ[name] for name in list(os.environ) if _is_secret(name)}
    hidden = (
        value for value in found if len(value) >= _MIN_SECRET and not (os.path.isabs(value) and os.path.exists(value))
    )
    return sorted(hidden, key=len, reverse=True)


@lru_cache(maxsize=4096)
def _is_secret(name: str) -> bool:
    return _KEY.search(name) is not None or names_secret(name)


def prepare_for_xla(*, on_processor: bool) -> None:
    """Set variables that torch_xla reads on import; with ``on_processor`` it uses the CPU even if there is a TPU."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # otherwise every compilation prints a warning
    if on_processor:
        os.environ["PJRT_DEVICE"] = "CPU"


def visible_gpus() -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``, or None if it is not set (every device is visible)."""
    value = os.environ.get(GPU_VARIABLE)
    return None if value is None else [entry.strip() for entry in value.split(",") if entry.strip()]


@contextmanager
def unchanged_environment() -> Iterator[None]:
    """Restore ``os.environ`` when the block ends."""
    before = dict(os.environ)
    try:
        yield
    finally:
        now = dict(os.environ)
        for name in now.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if now.get(name) != value})


@contextmanager
def clear_environment() -> Iterator[None]:
    """Run the block without any variable, and restore all of them after it."""
    with unchanged_environment():
        os.environ.clear()
        yield


@contextmanager
def patch_environment(**variables: object) -> Iterator[None]:
    """Run the block with ``variables`` set, their names in upper case, and restore all variables after it."""
    with unchanged_environment():
        os.environ.update({name.upper(): str(value) for name, value in variables.items()})
        yield
