"""Full tensors that are kept equal to sharded ones are dropped where nothing needs them, although code holds them."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.distributed.sharded_arithmetic import ShardedArithmetic
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


def assign_repeatedly(world: World, num_rows: int) -> int:
    comm = TorchComm(world, DefaultGroup.adopt(world))
    mesh = init_device_mesh("cpu", (world.size,))
    weight = distribute_tensor(torch.zeros(num_rows, 2, device="cpu"), mesh, [Shard(0)])
    held = [torch.full((num_rows, 2), float(number), device="cpu") for number in range(5)]
    with ShardedArithmetic(comm).enabled(), torch.no_grad():
        copies = sharded.copies()
        assert copies is not None
        for value in held:
            copies.separate(weight, lambda tensor, data: tensor.set_(data))  # type: ignore[call-overload]
            sharded.copy_into(weight, value)
            copies.add(weight, value.detach(), by_value=True)
            copies.refresh()
        return len(list(copies.used()))


def test_a_copy_is_dropped_once_its_tensor_has_other_memory() -> None:
    assert run_ranks(assign_repeatedly, 2, 4) == [1, 1]


def test_ranks_without_a_part_drop_the_same_copies() -> None:
    assert run_ranks(assign_repeatedly, 2, 1) == [1, 1]
