"""Loops over several loaders, gradients read before a step, checked collectives and the end of schedules."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_nb import GeneralTracker, compat
from accel_nb.accelerator.process_state import DistributedType
from accel_nb.compat.accelerator import Accelerator
from accel_nb.compat.data.data_loaders import (
    DataLoaderDispatcher,
    DataLoaderShard,
    prepare_data_loader,
    skip_first_batches,
)
from accel_nb.compat.hf_utils import save
from accel_nb.compat.models.model_parts import get_parameters_from_modules
from accel_nb.compat.plugins import DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accel_nb.compat.states import AcceleratorState, GradientState, PartialState
from accel_nb.errors import MisuseError
from accel_nb.runtime.process.environment import set_rank_variables
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


@pytest.fixture(autouse=True)
def fresh_states() -> Iterator[None]:
    """Clear the shared states, which a test of the same process may have left."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_the_active_loader_is_the_one_of_the_innermost_loop() -> None:
    accelerator: Any = Accelerator()
    first, second = accelerator.prepare(DataLoader(range(4), 2), DataLoader(range(6), 2))
    state = accelerator.gradient_state
    assert state.active_dataloader is None
    for _ in first:
        assert state.active_dataloader is first
        inner = [(state.active_dataloader is second, state.end_of_dataloader) for _ in second]
        assert inner == [(True, False), (True, False), (True, True)]
    assert not state.in_dataloader
    assert state.active_dataloader is None


def test_a_loader_that_is_not_prepared_is_active_until_its_loop_is_left() -> None:
    state = GradientState()
    loader = DataLoaderShard(range(5), batch_size=2)
    ends = [(state.active_dataloader is loader, state.end_of_dataloader, state.remainder) for _ in loader]
    assert ends == [(True, False, 1), (True, False, 1), (True, True, 1)]
    assert not state.in_dataloader
    for _ in loader:
        break
    assert not state.in_dataloader


def test_a_prepared_loader_is_active_inside_of_a_loop_over_another_kind() -> None:
    accelerator: Any = Accelerator()
    prepared, own = accelerator.prepare(DataLoader(range(4), 2)), DataLoaderShard(range(2), batch_size=1)
    state = accelerator.gradient_state
    for _ in own:
        assert all(state.active_dataloader is prepared for _ in prepared)
        assert state.active_dataloader is own
    assert state.active_dataloader is None


def test_an_accelerator_whose_state_was_reset_raises_until_another_is_built() -> None:
    accelerator: Any = Accelerator()
    AcceleratorState._reset_state()
    with pytest.raises(AttributeError, match="reset_state"):
        _ = accelerator.num_processes
    with pytest.raises(AttributeError, match="reset_state"):
        accelerator.prepare(nn.Linear(1, 1))
    Accelerator()
    assert accelerator.num_processes == 1


def test_the_variable_for_debugging_checks_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not PartialState().debug
    AcceleratorState._reset_state(True)
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "yes")
    assert PartialState().debug
    accelerator: Any = Accelerator()
    assert accelerator.state.debug


def test_names_of_a_shared_tensor_that_are_not_stored_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.ones(2)
    with caplog.at_level(logging.WARNING):
        save({"a": weight, "b": weight, "c": torch.zeros(1)}, tmp_path / "w", safe_serialization=True)
    assert ["'b'" in record.getMessage() for record in caplog.records] == [True]
    assert sorted(load_file(tmp_path / "w")) == ["a", "c"]
    caplog.clear()
    save({"a": weight}, tmp_path / "w", safe_serialization=True)
    assert not caplog.records


def test_dispatching_needs_a_device_and_takes_no_function() -> None:
    loader = DataLoader(range(4), 2)
    with pytest.raises(ValueError, match="put_on_device"):
        prepare_data_loader(loader, dispatch_batches=True)
    with pytest.raises(MisuseError, match="slice_fn_for_dispatch"):
        prepare_data_loader(
            loader, put_on_device=True, dispatch_batches=True, slice_fn_for_dispatch=lambda batch: batch
        )


class Pairs:
    """A batch sampler without the attributes of torch's."""

    batch_size = 2

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2, 3])

    def __len__(self) -> int:
        return 2


def test_modules_that_are_not_given_have_no_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    assert get_parameters_from_modules(None, model, "cpu") == set()
    assert get_parameters_from_modules(r"1", model, "cpu") == set(model[1].parameters())


def test_a_batch_sampler_without_a_sampler_is_divided() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=Pairs())  # pyright: ignore[reportArgumentType]
    made = prepare_data_loader(loader, num_processes=2, process_index=1, use_seedable_sampler=True)
    assert [batch.tolist() for (batch,) in made] == [[2, 3]]


def test_an_accelerator_is_copied_with_its_arguments_and_what_it_has_prepared() -> None:
    accelerator: Any = Accelerator(gradient_accumulation_steps=3)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(range(8), 2)
    accelerator.prepare(model, optimizer, schedule, loader, skip_first_batches(DataLoader(range(8), 2), 1))
    copied: Any = pickle.loads(pickle.dumps(accelerator))
    assert copied.gradient_accumulation_steps == 3
    assert copied._models[0] is not model
    assert copied._models[0].weight.equal(model.weight)
    assert copied._optimizers[0].param_groups[0]["params"][0] is copied._models[0].weight
    assert copied._schedulers[0].optimizer is copied._optimizers[0]
    first, second = copied._dataloaders
    assert isinstance(first, DataLoaderShard)
    assert [batch.tolist() for batch in first] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [batch.tolist() for batch in second] == [[2, 3], [4, 5], [6, 7]]
    assert pickle.loads(pickle.dumps(loader)).batch_size == 2


def test_a_state_of_several_ranks_is_not_built_by_loading_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = pickle.dumps(PartialState())
    PartialState._reset_state()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    copied = pickle.loads(saved)
    assert (copied.process_index, copied.num_processes) == (0, 1)
    assert not copied.initialized


def test_the_variable_of_the_device_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:1")
    assert str(PartialState().device) == "cpu:1"
    AcceleratorState._reset_state(True)
    assert str(AcceleratorState().device) == "cpu:1"
    AcceleratorState._reset_state(True)
    accelerator: Any = Accelerator()
    assert str(accelerator.device) == str(accelerator.state.device) == "cpu:1"


def test_trackers_that_write_files_need_a_folder(tmp_path: Path) -> None:
    for log_with in ("tensorboard", ["wandb", "tensorboard"]):
        with pytest.raises(ValueError, match=r"tensorboard.*logging_dir"):
            Accelerator(log_with=log_with)
    Accelerator(log_with="tensorboard", project_dir=tmp_path)


def test_objects_of_one_process_are_gathered_as_they_are() -> None:
    accelerator: Any = Accelerator()
    value = (torch.ones(2), {"a": torch.zeros(1)})
    assert accelerator.gather_for_metrics(value, use_gather_object=True) is value


class Steps(GeneralTracker):
    """A tracker that keeps the steps that it gets, once it is open."""

    name = "steps"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] | None = None

    def start(self) -> None:
        self.steps = []

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        assert self.steps is not None, "it is not open"
        self.steps.append(step)


def test_a_tracker_is_open_after_init_trackers_and_counts_itself() -> None:
    tracker = Steps()
    accelerator: Any = Accelerator(log_with=tracker)
    accelerator.init_trackers("run")
    tracker.log({"loss": 1.0})
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 1.0, "average": None}, step=7)
    accelerator.end_training()
    assert tracker.steps == [None, None, 7]


def test_what_is_no_number_is_logged_only_to_trackers() -> None:
    accelerator: Any = Accelerator()
    accelerator.log({"note": "text", "both": {"a": 1.0}, "pictures": [object()], "loss": torch.tensor(1.0)})
    tracker = Steps()
    accelerator = Accelerator(log_with=tracker)
    accelerator.log({"note": "text"})
    accelerator.init_trackers("run")
    accelerator.log({"note": "text"}, step=3)
    with pytest.raises(MisuseError, match="'pictures'"):
        accelerator.log({"pictures": [object()]})
    accelerator.end_training()
    assert tracker.steps == [3]


def test_a_plugin_of_fsdp_is_read_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

    variables = {
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "2",
        "FSDP_BACKWARD_PREFETCH": "backward_post",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Head",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    assert plugin.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert plugin.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    assert plugin.as_options() == {
        "strategy": "fsdp",
        "fsdp.reshard_after_forward": False,
        "fsdp.cpu_offload": True,
        "fsdp.wrap": "classes",
        "fsdp.classes": ["Block", "Head"],
        "activation_checkpointing": True,
    }


def shards_by_variable(world: World) -> tuple[str, DistributedType, str]:
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    accelerator: Any = Accelerator()
    name, kind = accelerator.components.strategy.name, accelerator.distributed_type
    chosen: Any = Accelerator(strategy="ddp")
    found = name, kind, chosen.components.strategy.name
    accelerator.end_training()
    return found


def test_ranks_shard_models_if_the_variable_is_set() -> None:
    for found in run_ranks(shards_by_variable, 2, timeout_s=60):
        assert found == ("fsdp", DistributedType.FSDP, "ddp")


def two_ranks(world: World) -> dict[str, Any]:
    """Return what one of two ranks finds in gradients, batches, errors and schedules."""
    set_rank_variables(world)
    compat.install()
    from accelerate.utils import broadcast, gather, reduce
    from accelerate.utils.operations import DistributedOperationException

    accelerator: Any = Accelerator()
    found: dict[str, Any] = {}
    model = nn.Linear(1, 1, bias=False)
    accelerator.prepare(model)
    with accelerator.no_sync(model):
        losses = [model(torch.tensor([[float(1 + world.rank)]])).sum() for _ in range(2)]
        accelerator.backward(losses[0])
    found["local"] = model.weight.grad.item()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    found["averaged"] = model.weight.grad.item()

    for name, split in (("whole", False), ("parts", True)):
        loader = DataLoader(range(8), 2, shuffle=True)
        made = prepare_data_loader(loader, torch.device("cpu"), put_on_device=True, split_batches=split,
                                   dispatch_batches=True)  # fmt: skip
        active = [GradientState().active_dataloader is made for _ in made]
        batches = list(made)
        assert isinstance(made, DataLoaderDispatcher)
        assert type(loader) is DataLoader
        found[name] = sorted(gather(torch.cat(batches)).tolist()), [len(batch) for batch in batches], all(active)
    found["after"] = GradientState().in_dataloader

    stateful: Any = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = stateful.prepare(DataLoader(range(16), 2))
    states: list[Any] = []
    batches = [batch.tolist() for batch in loader if states.append(loader.state_dict()) is None]
    loader.load_state_dict(states[1])
    found["resumed"] = [batch.tolist() for batch in loader] == batches[2:]

    with pytest.warns(UserWarning, match="no optimizer"), accelerator.join_uneven_inputs([model], even_batches=False):
        found["joined"] = accelerator.gather(torch.ones(1)).tolist()
    accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.warns(UserWarning, match="shards of the model"), accelerator.join_uneven_inputs([model]):
        pass
    accelerator.state.distributed_type = DistributedType.MULTI_CPU

    accelerator.state.debug = PartialState().debug = True
    found["errors"] = 0
    for operation in (broadcast, reduce):
        try:
            operation({"x": torch.zeros(1 + world.rank)})
        except DistributedOperationException:
            found["errors"] += 1
    accelerator.state.debug = PartialState().debug = False

    for total in (2, 3, 4):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total)
        accelerator.prepare(optimizer, schedule)
        positions: list[int] = []
        for _ in range(3):
            schedule.step()
            positions.append(schedule.last_epoch)
        found[f"positions of {total}"] = positions
    accelerator.end_training()
    return found


def test_ranks_average_dispatch_check_and_end_schedules_as_there() -> None:
    for rank, found in enumerate(run_ranks(two_ranks, 2, timeout_s=60)):
        assert found["local"] == 1 + rank
        assert found["averaged"] == 3.0
        assert found["whole"] == (list(range(8)), [2, 2], True)
        assert found["parts"] == (list(range(8)), [1, 1, 1, 1], True)
        assert not found["after"]
        assert found["resumed"]
        assert found["joined"] == [1.0, 1.0]
        assert found["errors"] == 2
        # Two steps a call, and the last position is the number of steps.
        assert found["positions of 2"] == [2, 2, 2]
        assert found["positions of 3"] == [2, 3, 3]
        assert found["positions of 4"] == [2, 4, 4]
