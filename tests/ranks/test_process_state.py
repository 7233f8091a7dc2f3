"""Well-known properties, views and arguments on two real ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.process_state import PartialState
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


def places(world: World) -> dict[str, Any]:
    state = PartialState()
    with state.split_between_processes({"a": [1, 2, 3]}) as part, state.main_process_first():
        pass
    state.wait_for_everyone()
    state.destroy_process_group()  # it was open before, so it stays
    accelerator = Accelerator()
    return {
        "part": part["a"],
        "type": str(accelerator.distributed_type),
        "state": (accelerator.state.num_processes, accelerator.state.process_index, state.backend),
        "second": accelerator.on_process(lambda: world.rank, process_index=1)(),
        "local second": accelerator.on_local_process(lambda: world.rank, local_process_index=1)(),
        "multi": accelerator.multi_device,
    }


def test_a_state_describes_the_process_and_leaves_an_open_group_alone() -> None:
    first, second = run_ranks(places, 2)
    common = {"type": "MULTI_CPU", "multi": True}
    assert first == {
        **common, "part": [1, 2], "state": (2, 0, "gloo"), "second": None, "local second": None
    }  # fmt: skip
    assert second == {**common, "part": [3], "state": (2, 1, "gloo"), "second": 1, "local second": 1}


def notes_of_schedules(world: World, first: bool) -> list[str]:
    accelerator = Accelerator(world=world, cpu=True)
    loader = DataLoader(range(8), batch_size=2)
    if first:
        accelerator.prepare(loader)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3 * len(loader))
    accelerator.prepare(model, optimizer, schedule, *([] if first else [loader]))
    return [note for note in accelerator.describe()["notes"] if "--schedule samples" in note]


def test_a_schedule_that_was_built_before_its_loader_was_divided_is_said() -> None:
    (note,), _ = run_ranks(notes_of_schedules, 2, False)
    assert "from a loader before prepare, when the loader was 2 times as long" in note
    assert run_ranks(notes_of_schedules, 2, True) == [[], []]


def late_sync(world: World) -> tuple[list[float], list[float]]:
    """Two forward passes under no_sync, of which only the second backward pass averages."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)
    inputs = torch.arange(12.0).reshape(4, 3)[world.rank :: 2]
    with accelerator.no_sync(model):
        first, second = model(inputs[:1]).sum(), model(inputs[1:]).sum()
        accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    optimizer.step()
    return model.weight.detach().flatten().tolist(), inputs.sum(0).tolist()


def test_gradients_kept_back_are_averaged_when_asked_for() -> None:
    ranks = run_ranks(late_sync, 2)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    mean = torch.tensor([inputs for _, inputs in ranks]).mean(0)
    expected = model.weight.detach().flatten() - 0.1 * mean
    for weights, _ in ranks:
        torch.testing.assert_close(torch.tensor(weights), expected)


def nested_blocks(world: World) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)

    def gradient() -> float:
        model.weight.grad = None
        accelerator.backward(2 * model(torch.full((1, 1), float(world.rank))).sum())
        assert model.weight.grad is not None
        return float(model.weight.grad)

    found = []
    with accelerator.no_sync(model):
        with accelerator.no_sync(model):
            found.append(gradient())
        found.append(gradient())
        with accelerator.trigger_sync_in_backward(model):
            found.append(gradient())
        found.append(gradient())
        for _ in range(2):  # the second one closes a window
            with accelerator.accumulate(model):
                found.append(gradient())
    accelerator.close()
    return found


def test_blocks_without_averaging_may_be_nested() -> None:
    assert run_ranks(nested_blocks, 2) == [[0, 0, 0.5, 0, 0, 0], [1, 1, 0.5, 1, 1, 1]]


def draws(world: World, rng_types: list[str] | None) -> list[float]:
    accelerator = Accelerator(seed=3, rng_types=rng_types)
    loader = accelerator.prepare(DataLoader(range(4), batch_size=1))
    return [float(torch.rand(())) for _ in range(2) for _ in loader]


def test_generators_are_shared_at_each_epoch_if_asked_for() -> None:
    first, second = run_ranks(draws, 2, ["torch", "generator"])
    assert first == second
    assert len(set(first)) == len(first)
    first, second = run_ranks(draws, 2, None)
    assert set(first).isdisjoint(second)


def evaluation_only(world: World) -> list[float]:
    """A teacher that differs on each rank, is never averaged, and is prepared by one rank alone."""
    accelerator = Accelerator()
    teacher = nn.Linear(1, 1, bias=False)
    nn.init.constant_(teacher.weight, float(world.rank))
    if world.rank == 1:
        accelerator.prepare_model(teacher, evaluation_mode=True)
    return teacher(torch.ones(1, 1)).tolist()[0]


def test_a_model_for_evaluation_involves_no_other_rank() -> None:
    assert run_ranks(evaluation_only, 2) == [[0.0], [1.0]]
