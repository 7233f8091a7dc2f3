"""The communicators and the device mesh of a `Mesh` of several dimensions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from accel_nb.runtime.distributed.communicator import Communicator, LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.mesh import DATA_DIMENSIONS, DIMENSIONS, SUM_DIMENSIONS, Mesh
from accel_nb.runtime.world import World

_MODEL_DIMENSIONS = ("pp", "tp")


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """This rank's coordinates in the mesh, and the communicators along its dimensions.

    ``data`` connects the ranks that read different shares of a batch and hold the same layers, or shards of layers.
    ``sum`` connects these and the ranks that read other parts of the same sequences; gradients are averaged over it.
    ``cp``, ``pp`` and ``tp`` connect the ranks of one dimension, ``ep`` the ranks that hold different experts.
    ``device_mesh`` is the mesh of parameters (`Mesh.parameter_mesh`), ``expert_mesh`` the mesh of experts
    (`Mesh.expert_shape`).
    """

    mesh: Mesh
    data: Communicator
    sum: Communicator
    pp: Communicator
    cp: Communicator
    tp: Communicator
    ep: Communicator = field(default_factory=LocalComm)
    device_mesh: Any = None
    expert_mesh: Any = None

    @classmethod
    def of_data(cls, comm: Communicator) -> MeshGroups:
        """Return the mesh in which every rank reads a different share of the data; opens no process group."""
        mesh = Mesh(comm.world.rank, dp_replicate=comm.world.size)
        return cls(mesh, comm, comm, LocalComm(), LocalComm(), LocalComm())

    @classmethod
    def open(cls, mesh: Mesh, world: World, *, copies: bool = False) -> MeshGroups:
        """Open the process groups of a mesh; every rank must call. The default group must be open.

        With ``copies`` ranks that read other parts of sequences hold replicas of parameters, else shards.
        """
        from torch.distributed.device_mesh import init_device_mesh

        shape, device = mesh.parameter_mesh(copies=copies).shape, torch.device(world.device).type
        device_mesh = init_device_mesh(device, shape, mesh_dim_names=DIMENSIONS)
        ep, expert_mesh = LocalComm(), None
        if mesh.ep > 1:
            shape = mesh.pp, *mesh.parameter_mesh(copies=copies).expert_shape, mesh.tp
            expert_mesh = init_device_mesh(device, shape, mesh_dim_names=("pp", *DATA_DIMENSIONS, "ep", "tp"))
            along_ep = expert_mesh["ep"]
            ep = _join(tuple(along_ep.mesh.flatten().tolist()), world, along_ep.get_group())
        data = _connect(mesh, DATA_DIMENSIONS, world)
        return cls(
            mesh,
            data,
            data if mesh.cp == 1 else _connect(mesh, SUM_DIMENSIONS, world),
            cp=_connect(mesh, ("cp",), world),
            **{name: _connect(mesh, (name,), world, device_mesh[name].get_group()) for name in _MODEL_DIMENSIONS},
            ep=ep,
            device_mesh=device_mesh,
            expert_mesh=expert_mesh,
        )


def _connect(mesh: Mesh, dimensions: tuple[str, ...], world: World, group: Any = None) -> Communicator:
    """Return the communicator of the ranks along some dimensions; a new process group if none is given."""
    ranks = mesh.ranks_along(*dimensions)
    if group is None and len(ranks) > 1:
        opened = {others: dist.new_group(list(others)) for others in mesh.groups_along(*dimensions)}
        group = opened[ranks]
    return _join(ranks, world, group)


def _join(ranks: tuple[int, ...], world: World, group: Any) -> Communicator:
    """Return the communicator of some ranks, among them this one, over their process group."""
    index = ranks.index(world.rank)
    own = World(rank=index, size=len(ranks), local_rank=index, local_size=len(ranks), device=world.device)
    return LocalComm(own) if len(ranks) == 1 else TorchComm(own, DefaultGroup.adopt(world), group, ranks)
