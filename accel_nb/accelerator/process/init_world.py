"""Initialization of this process's world from the environment or an open process group, or as a single process."""

from __future__ import annotations

from dataclasses import replace

from accel_nb.config.sections import GroupOptions
from accel_nb.runtime.devices.registry import default_type, device_type
from accel_nb.runtime.distributed.communicator import Communicator, LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.process.environment import assigned_device, torchrun_world
from accel_nb.runtime.process.platforms import find_tpu
from accel_nb.runtime.world import World


def initialize_world(
    comm: Communicator | None, world: World | None, cpu: bool, options: GroupOptions
) -> tuple[Communicator, DefaultGroup | None]:
    """Return the communicator to train with, and the process group if this call opened it, to be closed later."""
    if comm is not None:
        return comm, None
    if world is None:
        world = find_world(cpu)
    if world.size == 1:
        return LocalComm(world), None
    is_open = DefaultGroup.is_open()
    backend = None if options.backend == "auto" else options.backend
    group = (
        DefaultGroup.adopt(world)
        if is_open
        else DefaultGroup.from_environment(world, timeout_s=options.timeout, backend=backend)
    )
    return TorchComm(world, group), None if is_open else group


def find_world(cpu: bool) -> World:
    """Return this process's world: from the environment or an open process group, else a world of one process."""
    world = torchrun_world()
    if DefaultGroup.is_open() and (world is None or assigned_device() is not None):
        return DefaultGroup.world_of_open_group() if world is None else world
    kind = device_type("cpu") if cpu else default_type()
    if world is None:
        has_tpu = kind.is_host and not cpu and find_tpu() is not None
        return World(device=f"{kind.name}:0" if not kind.is_host else "xla" if has_tpu else "cpu")
    return replace(world, device="cpu" if kind.is_host else f"{kind.name}:{world.local_rank}")
