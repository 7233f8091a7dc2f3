"""The accelerator on real ranks: what cannot be seen with one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.errors import MisuseError, UnsyncedGradientError
from accel_nb.runtime.world import World
from accel_nb.strategies.ddp import strategy as ddp_strategy
from accel_nb.telemetry.events import Event, StepDone
from tests.ranks.launch import run_ranks


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    @property
    def steps(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]


def stray(world: World) -> list[str]:
    messages = []
    model, scale = nn.Linear(2, 1), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [scale]}], lr=0.1)
    accelerator = Accelerator(world=world)
    names = {"model": model, "optimizer": optimizer, "scale": scale}
    accelerator.prepare(model, optimizer)
    accelerator.components.stepper.namespace = names
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()  # the stray parameter has no gradient yet
    accelerator.backward((model(torch.ones(1, 2)) * scale).sum())
    try:
        optimizer.step()
    except UnsyncedGradientError as error:
        messages.append(str(error))
    accelerator.close()

    late = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(world=world)
    accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.add_param_group({"params": late.parameters()})
    accelerator.backward((model(torch.ones(1, 2)) + late(torch.ones(1, 2))).sum())
    try:
        optimizer.step()
    except UnsyncedGradientError as error:
        messages.append(str(error))
    return messages


def test_gradient_outside_of_every_prepared_module_is_an_error_that_names_it() -> None:
    for messages in run_ranks(stray, 2):
        assert len(messages) == 2
        assert "parameter 0 of group 1" in messages[0]
        assert "(scale)" in messages[0]
        assert "shape ()" in messages[0]
        assert "parameter 0 of group 1" in messages[1]


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 2), nn.Linear(2, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.decode(self.encode(x)), x)


def trained_past_ddp(world: World, way: str) -> list[list[float]]:
    """Train where DDP does not look; return the weights."""
    torch.manual_seed(0)
    model = Autoencoder()
    del model.unused
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(world=world)
    accelerator.prepare(model, optimizer)
    for number in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + world.rank))
        if way == "method":
            accelerator.backward(model.loss(x))
        elif way == "evaluation mode":
            model.eval()
            accelerator.backward(nn.functional.mse_loss(model(x), x))
        else:
            loss = nn.functional.mse_loss(model(x), x)
            accelerator.backward(loss * 0.5, retain_graph=True)
            accelerator.backward(loss * 0.5)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.close()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def two_ranks_by_hand() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Autoencoder()
    del model.unused
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        for rank in range(2):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + rank))
            (model.loss(x) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().flatten() for parameter in model.parameters()]


@pytest.mark.parametrize("way", ["method", "evaluation mode", "second backward"])
def test_gradients_that_ddp_does_not_see_are_averaged_too(way: str) -> None:
    for weights in run_ranks(trained_past_ddp, 2, way):
        for found, expected in zip(weights, two_ranks_by_hand(), strict=True):
            torch.testing.assert_close(torch.tensor(found), expected)


def leaves_out(world: World) -> tuple[list[list[float]], list[str], bool]:
    """Train a model of which a part is never used; return weights, warnings, and whether that part has a gradient."""
    torch.manual_seed(0)
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(world=world)
    accelerator.prepare(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + world.rank))
            accelerator.backward(nn.functional.mse_loss(model(x), x))
            optimizer.step()
            optimizer.zero_grad()
    used = [*model.encode.parameters(), *model.decode.parameters()]
    said = [f"{item.filename}: {item.message}" for item in caught if "took no part" in str(item.message)]
    accelerator.close()
    return [parameter.flatten().tolist() for parameter in used], said, model.unused.weight.grad is None


def test_unused_parameters_are_found_in_the_first_step_and_training_goes_on() -> None:
    results = run_ranks(leaves_out, 2)
    for weights, _, is_untouched in results:
        assert is_untouched
        for found, expected in zip(weights, two_ranks_by_hand(), strict=True):
            torch.testing.assert_close(torch.tensor(found), expected)
    [said] = results[0][1]
    assert "unused.weight, unused.bias" in said
    assert said.startswith(__file__), "a warning is shown at the user's line"
    assert "--ddp.find-unused-parameters" in said
    assert results[1][1] == []


def removes_gradients(world: World) -> list[str]:
    """Remove gradients of the first backward pass, as code that keeps a layer fixed at first does; return warnings."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(world=world)
    accelerator.prepare(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.backward(model(torch.ones(4, 3)).sum())
        model[1].weight.grad = None
        optimizer.step()
    accelerator.close()
    return [str(item.message) for item in caught if "took no part" in str(item.message)]


def test_parameters_whose_gradients_are_removed_count_as_used() -> None:
    assert run_ranks(removes_gradients, 2) == [[], []]


def leaves_out_on_rank_0(world: World) -> str:
    """Leave a part of the model out in the second step, on one rank alone; return each rank's error."""
    ddp_strategy._ALL_RANKS_S = 1.0  # in this process of the test
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model.forward = lambda x, is_whole: model[0](x) + (model[1](x) if is_whole else 0)  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(world=world)
    accelerator.prepare(model, optimizer)
    try:
        for number in range(2):
            optimizer.zero_grad()
            accelerator.backward(model(torch.ones(4, 3), number == 0 or world.rank > 0).sum())
            optimizer.step()
    except (MisuseError, RuntimeError) as error:  # the other rank waits until this one is gone
        return str(error)
    return "no error"


def test_a_rank_that_alone_leaves_parameters_out_raises() -> None:
    first, second = run_ranks(leaves_out_on_rank_0, 2)
    assert "took no part in the loss on this worker" in first
    assert "no error" != second != first


def gathers(world: World) -> dict[str, Any]:
    accelerator = Accelerator(world=world)
    rank = world.rank
    facts = {
        "uneven": accelerator.gather(torch.full((rank + 1, 2), rank)).tolist(),
        "empty": accelerator.gather(torch.full((rank, 1), rank)).tolist(),
        "scalar": accelerator.gather(torch.tensor(rank)).tolist(),
        "nested": {k: v.tolist() for k, v in accelerator.gather({"a": torch.tensor([rank])}).items()},
        "reduced": accelerator.reduce(torch.tensor([1.0 + rank]), "mean").tolist(),
        "padded": accelerator.pad_across_processes(torch.ones(1, rank + 1), dim=1, pad_index=-1).tolist(),
        "broadcast": accelerator.broadcast(torch.tensor([rank]), from_process=1).tolist(),
        "main": accelerator.on_main_process(lambda: "here")(),
        "last": accelerator.on_last_process(lambda: "here")(),
    }
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(7), batch_size=2))
    facts["metrics"] = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    order: list[str] = []
    with accelerator.main_process_first():
        order.append("in")
    accelerator.wait_for_everyone()
    return facts


def test_gathering_and_friends() -> None:
    first, second = run_ranks(gathers, 2)
    for facts in (first, second):
        assert facts["uneven"] == [[0, 0], [1, 1], [1, 1]]
        assert facts["empty"] == [[1]]
        assert facts["scalar"] == [0, 1]
        assert facts["nested"] == {"a": [0, 1]}
        assert facts["reduced"] == [1.5]
        assert facts["broadcast"] == [1]
        assert sorted(value for batch in facts["metrics"] for value in batch) == list(range(7))
    assert first["padded"] == [[1.0, -1.0]]
    assert (first["main"], second["main"]) == ("here", None)
    assert (first["last"], second["last"]) == (None, "here")


def adversaries(world: World) -> list[float]:
    """Two models and two optimizers that take turns."""
    torch.manual_seed(0)
    maker, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    make_step = torch.optim.SGD(maker.parameters(), lr=0.1)
    critic_step = torch.optim.SGD(critic.parameters(), lr=0.1)
    names = {"maker": maker, "critic": critic, "make_step": make_step, "critic_step": critic_step}
    accelerator = Accelerator(world=world)
    cells = PlainCells(accelerator)
    cells.prepare(names, names)
    with cells.run_cell():
        for number in range(3):
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(number * 10 + world.rank))
            made = maker(x)
            critic_step.zero_grad()
            (critic(made.detach()).mean() - critic(x).mean()).backward()
            critic_step.step()
            make_step.zero_grad()
            (-critic(made).mean()).backward()
            make_step.step()
    accelerator.close()
    return torch.cat([p.detach().flatten() for m in (maker, critic) for p in m.parameters()]).tolist()


def test_two_optimizers_taking_turns_keep_replicas_equal() -> None:
    first, second = run_ranks(adversaries, 2)
    assert first == second


def reports(world: World) -> list[StepDone]:
    recorder = Recorder()
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = torch.utils.data.DataLoader(torch.arange(10.0).reshape(5, 2)[:, :1], batch_size=2)
    accelerator = Accelerator(world=world, batch="global", sink=recorder, gradient_accumulation_steps=2)
    accelerator.prepare(model, optimizer, loader)
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
    return recorder.steps


def test_steps_are_reported_with_each_ranks_own_loss() -> None:
    first, second = run_ranks(reports, 2)
    assert [step.loss for step in first] == [2.0, 8.0]  # samples 0, 4 then 8
    assert [step.num_samples for step in first] == [2, 1]
    assert second[0].loss == 4.0  # samples 2, 6
    assert [step.num_samples for step in second] == [2, 0]
