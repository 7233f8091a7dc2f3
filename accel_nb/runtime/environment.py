"""The process environment: the only module that reads or writes ``os.environ``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from accel_nb.runtime.world import World

OPTION_PREFIX = "ACCEL_NB_"

Platform = Literal["kaggle", "colab", "deepnote", "vscode", "jupyter", "script"]

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def option_variables() -> dict[str, str]:
    """Return the ``ACCEL_NB_...`` variables: the environment layer of the configuration."""
    return {name: value for name, value in os.environ.items() if name.startswith(OPTION_PREFIX)}


def detect_platform() -> Platform:
    """Name the notebook platform. Kaggle comes before Colab: its image carries Colab's variables too."""
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return "kaggle"
    if "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ:
        return "colab"
    if "DEEPNOTE_PROJECT_ID" in os.environ:
        return "deepnote"
    if "VSCODE_PID" in os.environ and "ipykernel" in sys.modules:
        return "vscode"
    return "jupyter" if "ipykernel" in sys.modules else "script"


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


def become_rank(world: World) -> None:
    """Make this worker process look like a ``torchrun`` rank, so that other trainers run in a cell too."""
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.local_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        _ACCEL_NB_WORKER_DEVICE=world.device,
    )


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
        os.environ.clear()
        os.environ.update(before)
