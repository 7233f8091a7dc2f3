"""One suite over every installed strategy and every precision: a new one gets it without a new file."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_nb.accelerator import Accelerator
from accel_nb.errors import MisuseError
from accel_nb.precision import build_precision
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.world import World
from accel_nb.strategies import Bundle, StrategyRegistry
from tests.contract.recipes import (
    OTHER_WAYS,
    STRATEGIES,
    Recipe,
    loss_of,
    on_smallest_world,
    parts,
    parts_for,
    weights_of,
)
from tests.contract.strategy_look import look_of
from tests.ranks.launch import run_ranks

PRECISIONS = ["no", "bf16", "fp16"]


@pytest.fixture(params=[*STRATEGIES, *OTHER_WAYS])
def strategy(request: pytest.FixtureRequest) -> str:
    return request.param


def in_each_precision(way: str, fn: Any) -> list[Any]:
    """Run ``fn(world, strategy, precision)`` for each precision in one world; return the results of all ranks."""
    return [result for results in on_smallest_world(way, for_precisions, fn) for result in results]


def for_precisions(world: World, strategy: str, fn: Any) -> list[Any]:
    return [fn(world, strategy, precision) for precision in PRECISIONS]


def build(world: World, strategy: str, precision: str, recipe: Recipe) -> tuple[Any, ...]:
    model, optimizer, scheduler, _ = parts(recipe, dtype=torch.float32)
    accelerator = Accelerator(world=world, strategy=strategy, mixed_precision=precision, cpu=True)
    accelerator.prepare(model, optimizer, scheduler)
    return accelerator, model, optimizer, scheduler


def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    generator = torch.Generator().manual_seed(100 * seed + accelerator.process_index)
    x, y = torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def state_goes_round(world: World, strategy: str, precision: str) -> bool:
    accelerator, model, optimizer, scheduler = build(world, strategy, precision, Recipe(optimizer="adamw"))
    inner, bundle = accelerator.components.strategy, Bundle((model,), (optimizer,), (scheduler,))
    step(accelerator, model, optimizer, 1)
    scheduler.step()
    saved = inner.read_state(bundle)
    first = [step(accelerator, model, optimizer, seed) for seed in (2, 3)]
    scheduler.step()
    inner.write_state(bundle, saved)
    second = [step(accelerator, model, optimizer, seed) for seed in (2, 3)]
    accelerator.close()
    return first == second


def test_training_goes_on_equally_after_state_was_read_and_written(strategy: str) -> None:
    assert all(in_each_precision(strategy, state_goes_round))


def computes_in(world: World, strategy: str, precision: str) -> dict[str, Any]:
    accelerator, model, optimizer, _ = build(world, strategy, precision, Recipe())
    seen: list[torch.dtype] = []
    handle = model[1].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].dtype))
    output = model(torch.randn(2, 5))
    with torch.no_grad():
        silent = model(torch.randn(2, 5))
    handle.remove()
    step(accelerator, model, optimizer, 1)
    accelerator.close()
    return {
        "precision": precision,
        "inner": seen,
        "outer": [output.dtype, silent.dtype],
        "weights": model[0].weight.dtype,
    }


def test_forward_computes_in_the_precision_and_returns_float32(strategy: str) -> None:
    for facts in in_each_precision(strategy, computes_in):
        expected = build_precision(facts["precision"], "cpu").policy.compute or torch.float32
        assert facts["inner"] == [expected, expected]
        assert facts["outer"] == [torch.float32, torch.float32]
        assert facts["weights"] == torch.float32


def overflows(world: World, strategy: str) -> dict[str, Any]:
    accelerator, model, optimizer, scheduler = build(world, strategy, "fp16", Recipe())
    before, rate = accelerator.get_state_dict(model), scheduler.get_last_lr()
    huge = torch.full((2, 5), 1e4) if world.is_last else torch.ones(2, 5)
    accelerator.backward(model(huge).square().sum() * 1e30)
    optimizer.step()
    scheduler.step()
    was_skipped = accelerator.optimizer_step_was_skipped
    unchanged = all(torch.equal(value, before[name]) for name, value in accelerator.get_state_dict(model).items())
    held = scheduler.get_last_lr() == rate
    optimizer.zero_grad()
    step(accelerator, model, optimizer, 1)
    scheduler.step()
    facts = {
        "skipped": was_skipped,
        "unchanged": unchanged,
        "held": held,
        "goes on": not accelerator.optimizer_step_was_skipped,
        "scheduler goes on": scheduler.get_last_lr() != rate,
    }
    accelerator.close()
    return facts


def test_step_is_skipped_on_every_rank_when_float16_overflows_on_one(strategy: str) -> None:
    for facts in on_smallest_world(strategy, overflows):
        assert all(facts.values()), facts


def names_in_pickle(model: nn.Module) -> set[str]:
    """The classes and functions that the stream of a pickled model names, as torch.save writes it."""
    return {str(value) for code, value, _ in pickletools.genops(pickle.dumps(model, 2)) if code.name == "GLOBAL"}


def leaves_no_trace(world: World, strategy: str, precision: str) -> dict[str, bool]:
    model, optimizer, scheduler, _ = parts(Recipe(), dtype=torch.float32)
    plain, keys, scheduler_keys = type(model), list(model.state_dict()), set(scheduler.state_dict())
    optimizer_before, before = dict(vars(optimizer)), list(map(id, model.parameters()))
    named_before = names_in_pickle(model)
    accelerator = Accelerator(world=world, strategy=strategy, mixed_precision=precision, cpu=True)
    same = accelerator.prepare(model, optimizer, scheduler) == (model, optimizer, scheduler)
    step(accelerator, model, optimizer, 1)
    stream = io.BytesIO()
    with sharded.collective_reads(accelerator.components.comm):  # as in a plain cell
        torch.save(model, stream)
        stream.seek(0)
        copies = [copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        copies.append(torch.load(stream, weights_only=False))
        pickled = pickle.dumps((model, optimizer, scheduler))
        names = names_in_pickle(model)
        same_keys = list(model.state_dict()) == keys
    whole = accelerator.get_state_dict(model)
    facts = {
        "same objects": same,
        "is instance": isinstance(model, plain) and type(model).__name__ == plain.__name__,
        "keys": same_keys and set(scheduler.state_dict()) == scheduler_keys,
        "plain copies": all(type(copied) is plain for copied in copies),
        "equal copies": all(torch.equal(copied[0].weight, whole["0.weight"]) for copied in copies),
        "plain optimizer copy": "step" not in vars(copy.deepcopy(optimizer))
        or "accel_nb" not in repr(vars(copy.deepcopy(optimizer))["step"]),
        "plain scheduler copy": type(pickle.loads(pickle.dumps(scheduler))) is type(scheduler).__mro__[1],
        "no word of ours": b"accel_nb" not in pickled,
        "stream of a plain model": names == named_before,  # torch.load(weights_only=True) compares these with a list
    }
    accelerator.unwrap_model(model)
    accelerator.close()
    facts["whole after close"] = all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    facts["same parameters"] = list(map(id, model.parameters())) == before
    facts["optimizer has them"] = list(map(id, optimizer.param_groups[0]["params"])) == before
    facts["plain after close"] = type(model) is plain and vars(optimizer).keys() <= optimizer_before.keys() | {
        "_opt_called"
    }
    return facts


def test_copies_are_plain_and_closing_leaves_no_trace(strategy: str) -> None:
    for facts in in_each_precision(strategy, leaves_no_trace):
        assert all(facts.values()), facts


def opens_again(world: World, strategy: str, folder: str) -> bool:
    recipe = Recipe()
    results = []
    for number in range(2):
        if world.size > 1:
            DefaultGroup.adopt(world).close()
        model, optimizer, _, loader = parts_for(strategy, recipe)
        accelerator = Accelerator(world=world, strategy=strategy, batch="global", cpu=True)
        accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            accelerator.backward(loss_of(recipe, model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.close()
        results.append(weights_of(model))
        if world.size > 1:
            torch.distributed.destroy_process_group()
            DefaultGroup.open(world, f"{folder}/store{number}")
            torch.distributed.barrier()  # a rank that leaves while others still connect would break their group
    return all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_world_can_be_closed_and_another_opened_in_one_process(strategy: str, tmp_path: Any) -> None:
    assert all(on_smallest_world(strategy, opens_again, str(tmp_path)))


def trains_side_by_side(world: World, strategy: str) -> bool:
    alone = []
    for precision in ("no", "bf16"):
        accelerator, model, optimizer, _ = build(world, strategy, precision, Recipe())
        alone.append([step(accelerator, model, optimizer, seed) for seed in range(3)])
        accelerator.close()
    pair = [build(world, strategy, precision, Recipe()) for precision in ("no", "bf16")]
    together: list[list[float]] = [[], []]
    for seed in range(3):
        for losses, (accelerator, model, optimizer, _) in zip(together, pair, strict=True):
            losses.append(step(accelerator, model, optimizer, seed))
    for accelerator, *_ in pair:
        accelerator.close()
    return alone == together


def test_two_accelerators_do_not_disturb_each_other(strategy: str) -> None:
    assert all(on_smallest_world(strategy, trains_side_by_side))


def prepares_twice(world: World, strategy: str) -> tuple[list[str], list[float]]:
    accelerator, model, optimizer, _ = build(world, strategy, "bf16", Recipe())
    assert accelerator.prepare(model) is model
    other = Accelerator(world=world, strategy=strategy, cpu=True)
    other.prepare(model, optimizer)
    held = accelerator.describe()["objects"]
    losses = [step(other, model, optimizer, 1)]
    accelerator.close()
    losses.append(step(other, model, optimizer, 1))
    other.close()
    return held, losses


def test_the_newest_accelerator_has_an_object(strategy: str) -> None:
    for held, losses in on_smallest_world(strategy, prepares_twice):
        assert not any("Linear" in item or "SGD" in item or "Adam" in item for item in held)
        assert losses[1] < losses[0]


def clips(world: World, strategy: str, precision: str) -> list[float]:
    accelerator, model, *_ = build(world, strategy, precision, Recipe())
    accelerator.backward(model(torch.ones(2, 5)).square().mean())
    before = float(accelerator.clip_grad_norm_(model.parameters(), 0.05))
    after = float(accelerator.clip_grad_norm_(model.parameters(), 0.05))
    accelerator.clip_grad_value_(model.parameters(), 0.001)
    largest = float(accelerator.clip_grad_norm_(model.parameters(), float("inf"), float("inf")))
    accelerator.close()
    return [before, after, largest]


def test_clipping_sees_true_gradients(strategy: str) -> None:
    for before, after, largest in in_each_precision(strategy, clips):
        assert before > 0.1
        assert after == pytest.approx(0.05, rel=1e-3)
        assert largest == pytest.approx(0.001, rel=1e-3)


def keeps_local(world: World, strategy: str) -> list[list[float]]:
    """Return the gradients of a rank on its own, then those that all have."""
    accelerator, model, optimizer, _ = build(world, strategy, "no", Recipe())
    found = []
    for is_local in (True, False):
        accelerator.components.strategy.keep_local(model, is_local)
        accelerator.backward(model(torch.full((2, 5), 1.0 + world.rank)).square().mean())
        accelerator.components.stepper.complete_gradients(list(model.parameters()))
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).tolist())
        accelerator.components.stepper.window.begin_step()
        optimizer.zero_grad()
    accelerator.close()
    return found


def refuses_local(world: World, strategy: str) -> bool:
    accelerator, model, *_ = build(world, strategy, "no", Recipe())
    with pytest.raises(MisuseError, match=strategy):
        accelerator.components.strategy.keep_local(model, True)
    with pytest.raises(MisuseError, match=strategy):
        accelerator.join_uneven_inputs([])
    accelerator.close()
    return True


def test_gradients_stay_on_each_rank_while_they_are_kept_local(strategy: str) -> None:
    if not StrategyRegistry().get(strategy.partition(" ")[0]).capabilities.supports_local_gradients:
        assert all(on_smallest_world(strategy, refuses_local))
        return
    per_rank = on_smallest_world(strategy, keeps_local)
    for rank, (own, shared) in enumerate(per_rank):
        model, *_ = parts(Recipe(), dtype=torch.float32)
        model(torch.full((2, 5), 1.0 + rank)).square().mean().backward()
        plain = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        torch.testing.assert_close(torch.tensor(own), plain)
        mean = torch.tensor([each[0] for each in per_rank]).mean(0)
        torch.testing.assert_close(torch.tensor(shared), mean)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_capabilities_are_honest_about_the_world(strategy: str) -> None:
    cls = StrategyRegistry().get(strategy)
    inner = cls(None, build_precision("no", "cpu"))
    assert cls.name == strategy
    size = cls.capabilities.min_world
    if size == 1:
        inner.open(World(), LocalComm())
        assert inner.data_coords() == (0, 1)
        inner.close()
    else:
        assert run_ranks(coordinates, size, strategy) == [(rank, size) for rank in range(size)]


def coordinates(world: World, strategy: str) -> tuple[int, int]:
    inner = StrategyRegistry().get(strategy)(None, build_precision("no", "cpu"))
    inner.open(world, TorchComm(world, DefaultGroup.adopt(world)))
    return inner.data_coords()


class Block(nn.Module):
    """A block that counts how often it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x + torch.tanh(self.linear(x))


def recomputes(world: World, strategy: str, is_on: bool) -> tuple[list[int], list[float], list[str]]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Dropout(0.3), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"activation_checkpointing": is_on}
    accelerator = Accelerator(world=world, strategy=strategy, cpu=True, seed=3, config=options)
    accelerator.prepare(model, optimizer)
    losses = [step(accelerator, model, optimizer, seed) for seed in range(3)]
    notes = accelerator.describe()["notes"]
    accelerator.close()
    assert all(type(block) is Block for block in model[0])
    return [block.num_calls for block in model[0]], losses, notes


def recomputes_or_not(world: World, strategy: str) -> list[Any]:
    return [recomputes(world, strategy, is_on) for is_on in (False, True)]


def test_activations_are_computed_again_where_asked(strategy: str) -> None:
    for (_, expected, _), (calls, losses, notes) in on_smallest_world(strategy, recomputes_or_not):
        assert calls == [6, 6]
        assert losses == pytest.approx(expected, abs=1e-6)
        assert any("2 blocks of Sequential recompute" in note for note in notes)


class Overlapping(nn.Module):
    """Has buffers with several elements at one place in memory, some not contiguous, and one of inference mode."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float32)
        self.register_buffer("positions", (torch.arange(3.0) + start).reshape(1, 3).expand(4, 3))
        self.register_buffer("transposed", (torch.arange(6.0) + start).reshape(3, 2).t())
        self.register_buffer("all_equal", torch.tensor(start).expand(2, 2), persistent=False)
        self.register_buffer("shifting", torch.tensor([start]).expand(3))
        self.register_buffer("measured", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.positions[0] + self.shifting) + self.transposed.sum() + self.all_equal.sum()


def overlapping(world: World, strategy: str) -> dict[str, Any]:
    model = Overlapping(10.0 * world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    accelerator = Accelerator(world=world, strategy=strategy, cpu=True)
    accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 3)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        model.shifting = (model.shifting[:1] + 1).expand(3)
        with torch.inference_mode():
            model.measured = torch.ones(2)
    whole = accelerator.get_state_dict(model)
    found = {name: value.tolist() for name, value in (*model.named_buffers(), ("weight", whole["layer.weight"]))}
    strides = {name: value.stride() for name, value in model.named_buffers()}
    accelerator.close()
    return {**found, "strides": strides}


def test_buffers_with_repeated_memory_are_those_of_rank_0_and_stay_as_they_are(strategy: str) -> None:
    expected = {name: value.stride() for name, value in Overlapping(0).named_buffers()} | {"measured": (1,)}
    first, *others = on_smallest_world(strategy, overlapping)
    assert first["strides"] == expected
    assert first["positions"][1] == [0, 1, 2]
    assert first["shifting"] == [2, 2, 2]
    assert all(other == first for other in others)


class Final(nn.Linear):
    """A model whose class cannot be changed."""

    def __init_subclass__(cls) -> None:
        raise TypeError("no classes are made of this one")


class FinalLoader(DataLoader[Any]):
    """A loader whose class cannot be changed."""

    def __init_subclass__(cls) -> None:
        raise TypeError("no classes are made of this one")


def fails_half_way(world: World, strategy: str, precision: str) -> dict[str, Any]:
    model, optimizer, scheduler, _ = parts(Recipe(optimizer="adamw"), dtype=torch.float32)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    loader = DataLoader(torch.arange(8), batch_size=4)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    bad = {
        "model": Final(2, 2),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(other),
        "loader": FinalLoader(torch.arange(8), batch_size=4),
    }
    accelerator = Accelerator(world=world, strategy=strategy, mixed_precision=precision, cpu=True)
    facts: dict[str, Any] = {}
    before = look_of(model, optimizer, scheduler, loader)
    for name, item in bad.items():
        try:
            accelerator.prepare(model, optimizer, scheduler, loader, item)
        except (MisuseError, TypeError):
            after = look_of(model, optimizer, scheduler, loader)
            facts[name] = after == before and not accelerator.prepared_objects
        else:
            facts[name] = (precision, name) == ("no", "model")  # some strategies change no class then
            accelerator.free_memory(model, optimizer, scheduler, loader, item)
            before = look_of(model, optimizer, scheduler, loader)
    optimizer.zero_grad()
    accelerator.prepare(model, optimizer, scheduler, loader)
    step(accelerator, model, optimizer, 1)
    accelerator.close()
    facts["trains"] = any(value.tolist() != kept[2] for value, kept in zip(model.parameters(), before[1], strict=False))
    return facts


def test_a_prepare_that_fails_leaves_everything_as_it_was(strategy: str) -> None:
    for facts in in_each_precision(strategy, fails_half_way):
        assert all(facts.values()), facts
