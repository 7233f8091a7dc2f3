"""The current world of this process, for code that has no communicator."""

from __future__ import annotations

from dataclasses import replace

from accel_nb.runtime.distributed.communicator import Communicator, LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.process.environment import assigned_device, torchrun_world
from accel_nb.runtime.world import World


def current_world() -> World:
    """Return the world that the environment describes, else an open group's, else a world of one rank."""
    world = torchrun_world()
    if world is None:
        return DefaultGroup.world_of_open_group() if DefaultGroup.is_open() else World()
    return world


def current_comm() -> Communicator:
    """Return a communicator over the open group, or a local one if there is none."""
    world = current_world()
    if world.size == 1 or not DefaultGroup.is_open():
        return LocalComm()
    if assigned_device() is None:  # torchrun assigns none: it is of the type that the group's backend is for
        world = replace(world, device=DefaultGroup.device_of_open_group(world.local_rank))
    return TorchComm(world, DefaultGroup.adopt(world))
