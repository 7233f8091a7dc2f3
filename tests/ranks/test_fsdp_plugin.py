"""A script that was written for FSDP elsewhere trains as it would on one device."""

from __future__ import annotations

import torch
from torch import nn

from accel_nb import Accelerator, FullyShardedDataParallelPlugin
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


def train(world: World, plugin: FullyShardedDataParallelPlugin | None) -> tuple[str, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    accelerator = Accelerator(world=world, cpu=True, fsdp_plugin=plugin)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)
    for step in range(3):
        x = torch.full((2, 4), 0.1 * (step + 1) * (world.rank + 1), dtype=torch.float64)
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.describe()["strategy"], accelerator.get_state_dict(model)


def test_a_script_with_the_plugin_trains_as_one_without():
    ((kind, plain), _), ((chosen, divided), _) = (
        run_ranks(train, 2, plugin)
        for plugin in (None, FullyShardedDataParallelPlugin(sharding_strategy="FULL_SHARD", use_orig_params=True))
    )
    assert (kind, chosen) == ("ddp", "fsdp")
    for name, value in plain.items():
        torch.testing.assert_close(divided[name], value, atol=1e-12, rtol=0)
