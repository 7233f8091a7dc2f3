"""Members of accelerate's records and states that programs call."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import DataLoader

from accel_nb.compat.accelerator import Accelerator
from accel_nb.compat.data.data_loaders import SkipDataLoader, skip_first_batches
from accel_nb.compat.kwargs_handlers import DistributedDataParallelKwargs, ProfileKwargs
from accel_nb.compat.parallelism import ParallelismConfig
from accel_nb.compat.plugins import DDPCommunicationHookType, FullyShardedDataParallelPlugin
from accel_nb.errors import MisuseError
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


def test_profile_kwargs_build_a_profiler() -> None:
    ready: list[str] = []
    record = ProfileKwargs(activities=["cpu"], on_trace_ready=lambda made: ready.append("ready"), record_shapes=True)
    with record.build() as profiler:
        torch.ones(3).sum()
    assert ready == ["ready"]
    assert any(event.key == "aten::sum" for event in profiler.key_averages())
    with pytest.raises(MisuseError, match="no activity 'abacus'"):
        ProfileKwargs(activities=["abacus"]).build()


def averaged(world: World, hook: str) -> torch.Tensor:
    """Return the gradient of a model that the program wraps itself, with a hook, on unequal samples."""
    model = nn.Linear(1, 1, bias=False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    DistributedDataParallelKwargs(comm_hook=hook).register_comm_hook(wrapped)
    (wrapped(torch.ones(1, 1)) * (1 + 2 * world.rank)).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad


def test_a_hook_is_registered_on_a_model_that_a_program_has_wrapped() -> None:
    for found in run_ranks(averaged, 2, "fp16", timeout_s=60):
        assert found.item() == 2.0
    fields = DistributedDataParallelKwargs(comm_hook="fp16").to_dict()
    assert "dim" in fields
    assert "comm_hook" not in fields
    assert DDPCommunicationHookType.list()[:2] == ["no", "fp16"]


class Profiles(ProfileKwargs):
    """A user's own options."""


@pytest.mark.parametrize("kind", [ProfileKwargs, Profiles])
def test_an_accelerator_has_its_handlers(kind: type[ProfileKwargs]) -> None:
    record = kind()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[record])
    assert (accelerator.profile_handler, accelerator.ddp_handler) == (record, None)
    assert accelerator.fp8_recipe_handler is accelerator.te_recipe_handler is accelerator.msamp_recipe_handler is None
    assert (accelerator.fp8_enabled, accelerator.deepspeed_config) == (False, {})
    assert not accelerator.state.fork_launched


def test_a_state_has_the_loaders_that_are_iterated() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(4), 2))
    state = accelerator.gradient_state
    seen = [state.dataloader_references for _ in skip_first_batches(loader, 1)]
    assert [len(found) for found in seen] == [2]
    for _ in loader:
        assert state.dataloader_references == [None, loader]
    assert state.dataloader_references == [None]


def test_policies_of_fsdp_are_made_and_checked() -> None:
    plugin = FullyShardedDataParallelPlugin()
    plugin.cpu_offload = True
    with pytest.raises(ValueError, match="OffloadPolicy of torch"):
        plugin.validate_cpu_offload()
    plugin.set_cpu_offload()
    plugin.validate_cpu_offload()
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert plugin.as_options()["fsdp.cpu_offload"] is True
    with pytest.raises(ValueError, match="MixedPrecisionPolicy"):
        plugin.validate_mixed_precision_policy()
    assert ParallelismConfig(tp_size=2, cp_size=3).non_data_parallel_size == 6
    assert ParallelismConfig(pp_size=2, tp_size=2, dp_shard_size=2).non_data_parallel_size == 4


class Averaging(torch.optim.SGD):
    """An optimizer with members of the names that accelerate's wrapper has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.optimizer, self.modes = "inner", list[str]()

    def train(self) -> None:
        self.modes.append("train")


def test_prepared_objects_have_the_members_of_wrappers() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saved = schedule.state_dict().keys()
    for _ in range(2):  # the second preparation changes nothing
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    assert (optimizer.optimizer, optimizer.scaler, optimizer.step_was_skipped) == (optimizer, None, False)
    optimizer.train()
    optimizer.eval()
    assert (schedule.scheduler, schedule.optimizers, schedule.split_batches) == (schedule, [optimizer], False)
    assert schedule.step_with_optimizer
    assert schedule.gradient_state.sync_gradients
    assert schedule.state_dict().keys() == saved
    assert isinstance(optimizer, torch.optim.SGD)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is torch.optim.SGD
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(0.01)]


def test_members_of_an_optimizers_own_stay() -> None:
    model = nn.Linear(1, 1)
    model, optimizer = Accelerator(cpu=True).prepare(model, Averaging(model.parameters(), lr=0.1))
    optimizer.train()
    assert (optimizer.optimizer, optimizer.modes) == ("inner", ["train"])


def test_a_step_that_overflows_is_seen_on_its_optimizer() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for value in (math.inf, 1.0):
        accelerator.backward(model(torch.ones(1, 1)).float().sum() * value)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is (value == math.inf)
    assert optimizer.scaler is accelerator.scaler


def test_loaders_have_the_members_of_an_iteration() -> None:
    accelerator = Accelerator(cpu=True)
    stream = SkipDataLoader(list(range(5)), skip_batches=1, batch_size=2)
    seen = [(batch.tolist(), stream.end_of_dataloader, accelerator.gradient_state.remainder) for batch in stream]
    assert seen == [([2, 3], False, 1), ([4], True, 1)]
    loader = accelerator.prepare(DataLoader(list(range(5)), 2))
    skipped = skip_first_batches(loader, 1)
    skipped.begin()
    assert [skipped.end_of_dataloader for _ in skipped] == [False, True]
    skipped.end()
    assert pickle.loads(pickle.dumps(loader)).batch_size == 2
