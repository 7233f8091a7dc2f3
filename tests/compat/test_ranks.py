"""Calls that code for the other package makes on some ranks only."""

from __future__ import annotations

import argparse
import copy
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from accel_nb import compat
from accel_nb.errors import ConfigError
from accel_nb.runtime.process.environment import set_rank_variables
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.mesh_models import gpt, loss_of, tokens


def save_and_load(world: World, folder: Path, does_each_save: bool) -> tuple[list[float], list[float], list[str]]:
    """Train, save on the main process or on each, spoil the weights, load; return the weights, and files of a hook."""
    set_rank_variables(world)
    compat.install()
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator: Any = Accelerator()
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 2))

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        (Path(output_dir) / "config.txt").write_text("mine")
        if does_each_save:
            called.append([tensor.shape for tensor in weights[0].values()])
            accelerator.wait_for_everyone()

    called: list[Any] = []
    accelerator.register_save_state_pre_hook(hook)
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    path = folder / "checkpoint-2"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if does_each_save or accelerator.is_main_process:
            accelerator.save_state(path)
    assert len(called) == does_each_save
    assert [str(item.message) for item in caught if "config.txt" in str(item.message)] == (
        []
        if world.is_main or not does_each_save
        else [
            "save_state: files that hooks write on rank 1 are not in the checkpoint, which has those of rank 0: "
            "config.txt. Collect what they contain with gather_object, and write it on rank 0"
        ]
    )
    saved = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(path, map_location="cpu")
    loaded = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    accelerator.end_training()
    return saved, loaded, sorted(entry.name for entry in path.glob("*.txt"))


@pytest.mark.parametrize("does_each_save", [False, True])
def test_the_main_process_saves_a_state_without_the_others(does_each_save: bool, tmp_path: Path) -> None:
    for saved, loaded, files in run_ranks(save_and_load, 2, tmp_path, does_each_save, timeout_s=30):
        assert any(saved)
        assert loaded == saved
        assert files == ["config.txt"]


def advance(world: World, options: dict[str, Any], is_overflow: bool) -> tuple[int, bool]:
    """Step an optimizer and its schedule twice; return the schedule's position, and whether it is its own wrapper."""
    set_rank_variables(world)
    compat.install()
    from accelerate import Accelerator

    accelerator: Any = Accelerator(**options)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer._is_overflow = is_overflow
        schedule.step()
        optimizer.zero_grad()
    return schedule.last_epoch, schedule.scheduler is schedule


@pytest.mark.parametrize(
    ("options", "is_overflow", "position"),
    [
        ({}, False, 4),
        ({}, True, 0),
        ({"split_batches": True}, False, 2),
        ({"config": {"schedule": "steps"}}, False, 2),
        ({"step_scheduler_with_optimizer": False}, True, 2),
    ],
)
def test_a_schedule_advances_by_the_number_of_processes(
    options: dict[str, Any], is_overflow: bool, position: int
) -> None:
    assert run_ranks(advance, 2, options, is_overflow, timeout_s=30) == [(position, True)] * 2


def gather_in_a_block(world: World, is_even: bool) -> tuple[list[int], list[int]]:
    """Return the samples that this rank reads in a block for uneven inputs, and those of all ranks."""
    set_rank_variables(world)
    compat.install()
    from accelerate import Accelerator

    accelerator: Any = Accelerator()
    accelerator.even_batches = is_even
    model = nn.Linear(1, 1)
    data: Any = torch.arange(5.0).unsqueeze(1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 2)
    )
    read: list[int] = []
    with accelerator.join_uneven_inputs([model], even_batches=None if is_even else True):
        for x in loader:
            read += [int(value) for value in x.flatten()]
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        found = accelerator.gather(torch.tensor(read)).tolist()
    accelerator.end_training()
    return read, found


@pytest.mark.parametrize("is_even", [False, True])
def test_ranks_with_equally_many_samples_gather_in_a_block_for_uneven_inputs(is_even: bool) -> None:
    (first, gathered), (second, other) = run_ranks(gather_in_a_block, 2, is_even)
    assert (first, second) == ([0, 1, 4, 0], [2, 3, 1, 2])
    assert gathered == other == first + second


def gather_values(world: World) -> list[Any]:
    """Gather values of several kinds as objects, and return the results."""
    set_rank_variables(world)
    compat.install()
    from accelerate import PartialState
    from accelerate.utils import gather_object

    rank = PartialState().process_index
    return [gather_object(value) for value in ([rank, "a"], (rank, None), {"b": rank}, "cd", rank)]


def test_items_of_any_container_are_gathered_in_one_list() -> None:
    expected = [[0, "a", 1, "a"], [0, None, 1, None], ["b", "b"], ["c", "d", "c", "d"], [0, 1]]
    assert run_ranks(gather_values, 2) == [expected] * 2
    assert run_ranks(gather_values, 1) == [[[0, "a"], (0, None), {"b": 0}, "cd", 0]]


def copy_state(world: World, folder: Path) -> tuple[list[int], int]:
    """Save records that hold a state by torch.save on one rank, load them on each; return ranks before and after."""
    set_rank_variables(world)
    compat.install()
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState

    states: Any = PartialState(), Accelerator(mixed_precision="bf16").state
    if world.is_main:
        torch.save(states, folder / "arguments.bin")
    states[0].wait_for_everyone()
    PartialState._reset_state()
    alone = torch.load(folder / "arguments.bin", weights_only=False)[0]
    state, full = torch.load(folder / "arguments.bin", weights_only=False)
    state.wait_for_everyone()
    assert AcceleratorState().mixed_precision == full.mixed_precision == "bf16"
    return [
        alone.process_index,
        state.process_index,
        copy.deepcopy(state).process_index,
        full.process_index,
    ], state.num_processes


def test_a_state_in_a_saved_record_is_loaded_as_that_of_its_process(tmp_path: Path) -> None:
    assert run_ranks(copy_state, 2, tmp_path) == [([rank] * 4, 2) for rank in range(2)]


def count_samples(world: World) -> tuple[list[int], list[int]]:
    """Return, for datasets of different sizes, what a program counts by hand and what is gathered for metrics."""
    set_rank_variables(world)
    compat.install()
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator: Any = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    counted, gathered = [], []
    for size in (7, 8, 9):
        loader = accelerator.prepare(DataLoader(torch.arange(size), 2))  # type: ignore[arg-type]
        own = torch.tensor(0)
        gathered.append(0)
        for batch in loader:
            own += len(batch)
            gathered[-1] += len(accelerator.gather_for_metrics(batch))
        counted.append(int(accelerator.reduce(own, "sum")))
    accelerator.end_training()
    return counted, gathered


def test_a_rank_without_a_sample_reads_one_that_no_metric_counts() -> None:
    assert run_ranks(count_samples, 2) == [([7, 8, 10], [7, 8, 9])] * 2


def merge_shards(world: World, folder: Path) -> bool:
    """Save a model that FSDP2 has sharded, merge the files by function and by command; return whether all is equal."""
    set_rank_variables(world)
    compat.install()
    from accelerate.commands.merge import merge_command_parser
    from accelerate.utils import merge_fsdp_weights

    torch.manual_seed(world.rank)  # ranks begin with different weights, and FSDP2 keeps each rank's part
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).bfloat16())
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    shards = folder / "pytorch_model_fsdp_0"
    save_shards({"model": model.state_dict()}, checkpoint_id=shards)
    expected = {name: cast(DTensor, value).full_tensor() for name, value in model.state_dict().items()}
    merge_fsdp_weights(str(shards), str(folder / "function"))
    if world.is_main:
        parser = argparse.ArgumentParser()
        merge_command_parser(parser.add_subparsers())
        options = parser.parse_args(["merge-weights", str(shards), str(folder / "command")])
        options.func(options)
    torch.distributed.barrier()
    merged = [load_file(folder / name / "model.safetensors") for name in ("function", "command")]
    return all(
        found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())
        for found in merged
    )


def test_shards_of_fsdp_are_merged_into_one_file(tmp_path: Path) -> None:
    assert run_ranks(merge_shards, 2, tmp_path) == [True, True]


def train_on_mesh(world: World, sizes: dict[str, int] | None) -> tuple[list[float], tuple[int, int, int], list[Any]]:
    """Train a few steps; return the weights, the coordinates of the process, and each dimension of the mesh.

    A dimension has its name, its number of processes, and whether the weights use the same process group.
    """
    set_rank_variables(world)
    compat.install()
    from accelerate import Accelerator, ParallelismConfig

    torch.manual_seed(0)
    mesh: Any = None if sizes is None else ParallelismConfig(**sizes)
    accelerator: Any = Accelerator(parallelism_config=mesh, split_batches=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(16, 3).double(), torch.randn(16, 1).double())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 4))
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    weights = [
        value for name in ("0.weight", "2.bias") for value in accelerator.get_state_dict(model)[name].flatten().tolist()
    ]
    place = accelerator.data_parallel_rank, accelerator.tensor_parallel_rank, accelerator.num_processes
    found: Any = accelerator.torch_device_mesh
    held: Any = getattr(model[0].weight, "device_mesh", None)
    assert found is accelerator.state.device_mesh
    dimensions = [
        (name, found[name].size(), held is not None and held.get_group(name) is found.get_group(name))
        for name in (() if found is None else found.mesh_dim_names)
    ]
    accelerator.end_training()
    return weights, place, dimensions


def refusal_of_mesh(world: World, sizes: dict[str, int]) -> str:
    set_rank_variables(world)
    compat.install()
    from accelerate import Accelerator, ParallelismConfig

    mesh: Any = ParallelismConfig(**sizes)
    try:
        Accelerator(parallelism_config=mesh)
    except (ValueError, ConfigError) as error:
        return str(error)
    return ""


def test_a_mesh_divides_data_weights_and_layers() -> None:
    ((expected, _, nothing),) = run_ranks(train_on_mesh, 1, None)
    assert nothing == []
    for sizes, coordinates, dimensions in (
        ({"tp_size": 2}, [(0, 0, 2), (0, 1, 2)], [("tp", 2, True)]),
        ({"dp_shard_size": 2}, [(0, 0, 2), (1, 0, 2)], [("dp_shard", 2, True)]),
        ({"dp_replicate_size": 2}, [(0, 0, 2), (1, 0, 2)], [("dp_replicate", 2, False)]),
        (
            {"dp_replicate_size": 2, "tp_size": 2},
            [(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4)],
            [("dp_replicate", 2, True), ("tp", 2, True)],
        ),
    ):
        found = run_ranks(train_on_mesh, len(coordinates), sizes)
        assert [place for _, place, _ in found] == coordinates
        for weights, _, mesh in found:
            assert weights == pytest.approx(expected, abs=1e-12)
            assert mesh == dimensions


def test_a_mesh_of_another_size_or_for_deepspeed_is_refused() -> None:
    messages = run_ranks(refusal_of_mesh, 2, {"tp_size": 4})
    assert all("tp_size=4" in message or "mesh.tp is 4" in message for message in messages), messages
    messages = run_ranks(refusal_of_mesh, 2, {"sp_size": 2})
    assert all("sp_size=2 from ParallelismConfig(...)" in message for message in messages)


def train_gpt(world: World, sizes: dict[str, int] | None) -> tuple[Tensor, list[str]]:
    """Train a small model with attention over a mesh; return its weights, and the options of the mesh that are set."""
    set_rank_variables(world)
    compat.install()
    from accelerate import Accelerator, ParallelismConfig

    mesh: Any = None if sizes is None else ParallelismConfig(**sizes)
    accelerator: Any = Accelerator(parallelism_config=mesh, split_batches=True)
    model = gpt()
    x, y = tokens(0)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer, loader = accelerator.prepare(model, made, DataLoader(TensorDataset(x, y), 4))
    for x, y in loader:
        with accelerator.maybe_context_parallel(buffers=[x, y], buffer_seq_dims=[1, 1]):
            accelerator.backward(loss_of(prepared, x, y))
            optimizer.step()
            optimizer.zero_grad()
    options = accelerator.resolved.config.mesh.model_dump(exclude_defaults=True)
    return torch.cat([value.flatten() for value in accelerator.get_state_dict(prepared).values()]), sorted(options)


def test_sequences_and_blocks_are_divided_as_the_mesh_says() -> None:
    [(expected, _)] = run_ranks(train_gpt, 1, None)
    for sizes, name in (({"cp_size": 2}, "cp"), ({"pp_size": 2}, "pp")):
        for weights, options in run_ranks(train_gpt, 2, sizes):
            assert options == [name]
            assert (weights - expected).abs().max() < 1e-9
