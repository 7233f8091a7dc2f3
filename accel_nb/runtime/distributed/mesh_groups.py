"""The communicators and the device mesh of a `Mesh` of several dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accel_nb.runtime.distributed.communicator import Communicator, LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.mesh import DIMENSIONS, Mesh
from accel_nb.runtime.world import World


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """This rank's place in the mesh, and the communicators of its rows and columns.

    ``data`` connects the ranks that read different shares of a batch and hold the same parts of layers, ``tp`` those
    that compute different parts of the same layers.
    """

    mesh: Mesh
    data: Communicator
    tp: Communicator
    device_mesh: Any = None

    @classmethod
    def of_data(cls, comm: Communicator) -> MeshGroups:
        """Return the mesh in which every rank reads a share of its own; nothing is opened."""
        return cls(Mesh(comm.world.rank, comm.world.size), comm, LocalComm())

    @classmethod
    def open(cls, mesh: Mesh, world: World) -> MeshGroups:
        """Open the process groups of a mesh; every rank must call. The default group must be open."""
        from torch.distributed.device_mesh import init_device_mesh

        kind = torch.device(world.device).type
        device_mesh = init_device_mesh(kind, mesh.shape, mesh_dim_names=DIMENSIONS)
        data_groups: list[Any] = [dist.new_group(list(range(first, mesh.size, mesh.tp))) for first in range(mesh.tp)]
        group = DefaultGroup.adopt(world)
        data_world = _world(mesh.data_index, mesh.num_data, world.device)
        data = (
            LocalComm(data_world)
            if mesh.num_data == 1
            else TorchComm(data_world, group, data_groups[mesh.tp_index], mesh.data_ranks)
        )
        tp_world = _world(mesh.tp_index, mesh.tp, world.device)
        tp = TorchComm(tp_world, group, device_mesh["tp"].get_group(), mesh.tp_ranks)
        return cls(mesh, data, tp, device_mesh)


def _world(rank: int, size: int, device: str) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size, device=device)
