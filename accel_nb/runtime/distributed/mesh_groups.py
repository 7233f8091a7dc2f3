"""The communicators and the device mesh of a `Mesh` of several dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accel_nb.runtime.distributed.communicator import Communicator, LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.mesh import DATA_DIMENSIONS, DIMENSIONS, SUM_DIMENSIONS, Mesh
from accel_nb.runtime.world import World

_OTHERS = ("pp", "tp")


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """This rank's place in the mesh, and the communicators of its rows and columns.

    ``data`` connects the ranks that read different shares of a batch and hold the same layers, or parts of layers;
    ``sum`` those, and the ranks that read other parts of the same sequences: gradients are averaged over it; ``cp``,
    ``pp`` and ``tp`` the ranks of one dimension. ``device_mesh`` is the mesh of parameters, see `Mesh.holding`.
    """

    mesh: Mesh
    data: Communicator
    sum: Communicator
    pp: Communicator
    cp: Communicator
    tp: Communicator
    device_mesh: Any = None

    @classmethod
    def of_data(cls, comm: Communicator) -> MeshGroups:
        """Return the mesh in which every rank reads a share of its own; nothing is opened."""
        mesh = Mesh(comm.world.rank, dp_replicate=comm.world.size)
        return cls(mesh, comm, comm, LocalComm(), LocalComm(), LocalComm())

    @classmethod
    def open(cls, mesh: Mesh, world: World, *, copies: bool = False) -> MeshGroups:
        """Open the process groups of a mesh; every rank must call. The default group must be open.

        With ``copies`` ranks that read other parts of sequences hold copies of parameters, else parts of one.
        """
        from torch.distributed.device_mesh import init_device_mesh

        shape = mesh.holding(copies=copies).shape
        device_mesh = init_device_mesh(torch.device(world.device).type, shape, mesh_dim_names=DIMENSIONS)
        data = _connect(mesh, DATA_DIMENSIONS, world)
        return cls(
            mesh,
            data,
            data if mesh.cp == 1 else _connect(mesh, SUM_DIMENSIONS, world),
            cp=_connect(mesh, ("cp",), world),
            **{name: _connect(mesh, (name,), world, device_mesh[name].get_group()) for name in _OTHERS},
            device_mesh=device_mesh,
        )


def _connect(mesh: Mesh, dimensions: tuple[str, ...], world: World, group: Any = None) -> Communicator:
    """Return the communicator of the ranks along some dimensions; a new process group if none is given."""
    ranks = mesh.ranks_along(*dimensions)
    own = World(
        rank=ranks.index(mesh.rank),
        size=len(ranks),
        local_rank=ranks.index(mesh.rank),
        local_size=len(ranks),
        device=world.device,
    )
    if len(ranks) == 1:
        return LocalComm(own)
    if group is None:
        opened = {others: dist.new_group(list(others)) for others in mesh.groups_along(*dimensions)}
        group = opened[ranks]
    return TorchComm(own, DefaultGroup.adopt(world), group, ranks)
