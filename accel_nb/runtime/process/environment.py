"""The process environment: the only module that reads or writes ``os.environ``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

from accel_nb.runtime.world import World
from accel_nb.secrets import names_secret

OPTION_PREFIX = "ACCEL_NB_"
LAUNCH_STORE = "_ACCEL_NB_STORE"
"""Names the inherited descriptor of the file that `launch_store` opens."""

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_T = TypeVar("_T")
_KEY = re.compile(r"(?i)(?:^|_)(?:api)?(?:key|pat)(?:$|_)")
_MIN_SECRET = 8
"""Shorter values are words that texts have anyway."""

_OURS = (OPTION_PREFIX, f"_{OPTION_PREFIX}")
_OF_RANKS = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
    }
)  # fmt: skip


def option_variables() -> dict[str, str]:
    """Return the ``ACCEL_NB_...`` variables: the environment layer of the configuration."""
    return {name: os.environ[name] for name in list(os.environ) if name.startswith(OPTION_PREFIX)}


def variable(name: str, default: _T) -> str | _T:
    """Return a variable of the user's, or ``default`` where it is not set."""
    return os.environ.get(name, default)


def variables_named(*names: str) -> dict[str, str]:
    """Return those of some variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def notebook_variables() -> dict[str, str]:
    """Return the variables that are the notebook's to set; not ours, and not those that make a process a rank."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OURS) and name not in _OF_RANKS}


def set_variables(changes: Mapping[str, str | None]) -> None:
    """Set variables; None takes one away. What `notebook_variables` leaves out is left alone."""
    for name, value in changes.items():
        if name.startswith(_OURS) or name in _OF_RANKS:
            continue
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def zygote_environment() -> dict[str, str]:
    """Return the environment that a zygote starts with: this one, with one thread for each maths library.

    A fork is safe only from a process with one thread; `restore_threads` undoes it in the workers.
    """
    environment = dict(os.environ)
    for name in _ONE_THREAD:
        if name in environment:
            environment[f"_ACCEL_NB_SAVED_{name}"] = environment[name]
        environment[name] = "1"
    return environment


def restore_threads() -> None:
    """Give a forked worker the thread variables back that the kernel had."""
    for name in _ONE_THREAD:
        saved = os.environ.pop(f"_ACCEL_NB_SAVED_{name}", None)
        if saved is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = saved


def all_variables() -> dict[str, str]:
    """Return a copy of the whole environment, to start a process with or to see who started this one."""
    return dict(os.environ)


def rank_variables(world: World, *, address: str, port: int, machine: int = 0) -> dict[str, str]:
    """Return what ``torchrun`` gives a rank to find its place and the others by; ``machine`` counts from 0."""
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
    """Return the path of the anonymous file over which the ranks of a launch on one machine meet, if this is one."""
    descriptor = os.environ.get(LAUNCH_STORE)
    return None if descriptor is None else f"/proc/self/fd/{int(descriptor)}"


def become_rank(world: World) -> None:
    """Make this worker process look like a ``torchrun`` rank, so that other trainers run in a cell too."""
    variables = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "_ACCEL_NB_WORKER_DEVICE": world.device,
    }
    # Not by `update`: it asks every class of mappings there is what it was given, and each page of memory that is
    # touched on the way becomes this worker's own.
    for name, value in variables.items():
        os.environ[name] = value


def set_local_rank(world: World) -> None:
    """Set ``LOCAL_RANK``, which not every way of starting a rank has set, for a library that reads it at any time."""
    os.environ["LOCAL_RANK"] = str(world.local_rank)


def torchrun_world() -> World | None:
    """Return the world that ``torchrun`` or our own pool put into the variables, or None outside of both."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return World(
        rank=rank,
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        device=os.environ.get("_ACCEL_NB_WORKER_DEVICE", "cpu"),
    )


def secret_values() -> list[str]:
    """Return the values of variables whose names say secret, key, token or password, the longest first.

    Short ones are left out, and paths of what exists: the secret is in the file.
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
    """Set what torch_xla reads when it is imported; ``on_processor`` takes the processor also where there is a TPU."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else each program that is compiled writes a warning
    if on_processor:
        os.environ["PJRT_DEVICE"] = "CPU"


def visible_gpus() -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``, or None when it is not set (every device is visible)."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [entry.strip() for entry in value.split(",") if entry.strip()]


@contextmanager
def unchanged_environment() -> Iterator[None]:
    """Put ``os.environ`` back as it was when the block ends."""
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
    """Run the block without any variable, and put all of them back after it."""
    with unchanged_environment():
        os.environ.clear()
        yield


@contextmanager
def patch_environment(**variables: object) -> Iterator[None]:
    """Run the block with some variables set, by their names in upper case, and put all back after it."""
    with unchanged_environment():
        os.environ.update({name.upper(): str(value) for name, value in variables.items()})
        yield
