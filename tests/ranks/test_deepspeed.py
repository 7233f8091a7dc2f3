"""DeepSpeed's stages train as one process does, whatever the model is made of, and give everything back."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from accel_nb.accelerator import Accelerator
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.world import World
from tests.contract.strategy_look import look_of
from tests.ranks.language_model import Language, flat, loss_of, tokens
from tests.ranks.launch import run_ranks
from tests.support.nightly import nightly

if find_spec("deepspeed") is None:
    pytest.skip("deepspeed is an extra", allow_module_level=True)

WAYS: list[dict[str, Any]] = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 2, "offload_optimizer": "cpu", "bucket_size": 50},
    {"zero_stage": 3},
    {"zero_stage": 3, "persistent_size": 0, "prefetch_size": 0},
    {"zero_stage": 3, "persistent_size": 0, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
]


def language(kind: str = "adamw", *, has_single: bool = False) -> tuple[Language, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Language()
    if not has_single:
        model.scale = nn.Parameter(model.scale.data.reshape(1))  # stage 3 refuses a parameter without a dim
    values = [value for value in model.parameters() if value.requires_grad]
    groups = [{"params": values[:3]}, {"params": values[3:], "weight_decay": 0.1}]
    if kind == "adamw":
        return model, torch.optim.AdamW(groups, lr=0.05)
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def by_hand(steps: range, kind: str = "adamw", clip: float | None = None) -> Tensor:
    model, optimizer = language(kind)
    for number in steps:
        loss_of(model, *tokens(number)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def run(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    rank, size = accelerator.process_index, accelerator.num_processes
    for number in steps:
        x, y = tokens(number)
        accelerator.backward(loss_of(model, x[rank::size], y[rank::size]))
        optimizer.step()
        optimizer.zero_grad()


def build(world: World, **options: Any) -> Accelerator:
    return Accelerator(world=world, cpu=True, strategy="deepspeed", config={"deepspeed": options})


def trains(world: World) -> list[tuple[Tensor, dict[str, int]]]:
    found = []
    for options, kind in itertools.product(WAYS, ["adamw", "sgd"]):
        model, optimizer = language(kind, has_single=options["zero_stage"] < 3)
        weight, names = model.embed.weight, [set(vars(part)) for part in model.modules()]
        if not world.is_main:
            with torch.no_grad():
                weight.zero_()  # rank 0's weights become everyone's
        accelerator = build(world, **options)
        accelerator.prepare(model, optimizer)
        run(accelerator, model, optimizer, range(3))
        with torch.no_grad():
            model(tokens(0)[0])  # an evaluation in between leaves no trace
        run(accelerator, model, optimizer, range(3, 4))
        held = accelerator.memory_map()
        accelerator.close()
        assert model.head.weight is model.embed.weight is weight
        assert [set(vars(part)) for part in model.modules()] == names
        assert all(not vars(value) for value in model.parameters())
        state = optimizer.state[weight]
        assert state["exp_avg" if kind == "adamw" else "momentum_buffer"].shape == weight.shape
        run_alone(model, optimizer, range(4, 6))  # what came back goes on in one process
        found.append((flat(model), held))
    return found


def run_alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        loss_of(model, *tokens(number)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("size", [nightly(2), 3])
def test_training_equals_one_process_and_comes_back(size: int) -> None:
    for found in run_ranks(trains, size):
        for (options, kind), (weights, _) in zip(itertools.product(WAYS, ["adamw", "sgd"]), found, strict=True):
            expected = by_hand(range(6), kind)
            torch.testing.assert_close(weights, expected, rtol=0, atol=2e-5, msg=lambda t, o=options: f"{o}: {t}")
        stages = [found[0][1], found[2][1], found[8][1]]
        assert stages[1]["gradients"] < 0.7 * stages[0]["gradients"]
        assert stages[2]["parameters"] < 0.7 * stages[1]["parameters"]


def controls_the_run(world: World, stage: int) -> list[Tensor]:
    """Clip, throw gradients away, change weights, load the optimizer: each of these counts, at once."""
    model, optimizer = language()
    accelerator = build(world, zero_stage=stage, persistent_size=20)
    accelerator.prepare(model, optimizer)
    x, y = tokens(9)
    accelerator.backward(loss_of(model, x, y))
    optimizer.zero_grad()  # of no consequence
    for number in range(3):
        x, y = tokens(number)
        accelerator.backward(loss_of(model, x[world.rank :: world.size], y[world.rank :: world.size]))
        accelerator.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    found = [torch.cat([value.flatten() for value in accelerator.get_state_dict(model).values()])]
    for module in (model, nn.ModuleList([model])) if stage == 3 else ():
        with pytest.raises(MisuseError, match="holds shards of the model"):
            module.state_dict()  # here ranks need not read together, and would find divided parameters empty
    with sharded.collective_reads(accelerator.components.comm):
        kept = {name: value.clone() for name, value in model.state_dict().items()}
    saved = accelerator.components.strategy.read_state(accelerator.components.stepper.bundle)
    run(accelerator, model, optimizer, range(3, 5))
    model.load_state_dict(kept)
    accelerator.components.strategy.write_state(accelerator.components.stepper.bundle, saved)
    run(accelerator, model, optimizer, range(3, 5))
    accelerator.close()
    return [*found, flat(model)]


@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_dropping_and_loading_count_at_once(stage: int) -> None:
    model, optimizer = language()
    for number in range(3):
        loss_of(model, *tokens(number)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    first = torch.cat([value.flatten() for value in model.state_dict().values()])
    run_alone(model, optimizer, range(3, 5))
    for found in run_ranks(controls_the_run, 2, stage):
        torch.testing.assert_close(found[0], first, rtol=0, atol=2e-5)
        torch.testing.assert_close(found[1], flat(model), rtol=0, atol=2e-5)


def saves(world: World, way: str, folder: str) -> Tensor:
    accelerator, model, optimizer = prepared(world, way)
    run(accelerator, model, optimizer, range(3))
    accelerator.save_state(f"{folder}/saved")
    run(accelerator, model, optimizer, range(3, 6))
    accelerator.close()
    return flat(model)


def loads(world: World, way: str, folder: str) -> Tensor:
    accelerator, model, optimizer = prepared(world, way)
    run(accelerator, model, optimizer, range(7, 8))
    accelerator.load_state(f"{folder}/saved")
    run(accelerator, model, optimizer, range(3, 6))
    accelerator.close()
    return flat(model)


def prepared(world: World, way: str) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    strategy, _, stage = way.partition(" ")
    options = {"deepspeed": {"zero_stage": int(stage), "persistent_size": 20}} if int(stage or 0) == 3 else {}
    if stage and int(stage) < 3:
        options = {"deepspeed": {"zero_stage": int(stage)}}
    model, optimizer = language()
    accelerator = Accelerator(world=world, cpu=True, strategy=strategy, config=options)
    accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


@pytest.mark.parametrize(
    ("saver", "before", "loader", "after"),
    [
        ("deepspeed 3", 2, "deepspeed 3", 3),
        ("deepspeed 2", 2, "ddp", 3),
        ("fsdp", 2, "deepspeed 1", 3),
        ("single", 1, "deepspeed 3", 2),
        ("deepspeed 3", 2, "single", 1),
    ],
)
def test_what_one_saves_another_goes_on_with(saver: str, before: int, loader: str, after: int, tmp_path: Path) -> None:
    def on(fn: Callable[..., Tensor], way: str, size: int) -> list[Tensor]:
        return run_ranks(fn, size, way, str(tmp_path)) if size > 1 else [fn(World(), way, str(tmp_path))]

    expected = on(saves, saver, before)[0]
    for found in on(loads, loader, after):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def two_models(world: World) -> Tensor:
    """One optimizer steps two models, and another a third; a layer thaws in between."""
    torch.manual_seed(0)
    first, second, third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    second.weight.requires_grad_(False)
    one = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.1)
    two = torch.optim.SGD(third.parameters(), lr=0.1)
    accelerator = build(world) if world.size > 1 else Accelerator(cpu=True)
    accelerator.prepare(first, second, third, one, two)
    for number in range(4):
        if number == 2:
            second.weight.requires_grad_(True)
            accelerator.components.preparer.refresh()
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))[world.rank :: world.size]
        accelerator.backward(third(second(torch.tanh(first(x)))).square().mean())
        one.step()
        two.step()
        one.zero_grad()
        two.zero_grad()
    accelerator.close()
    return torch.cat([flat(model) for model in (first, second, third)])


def test_several_models_and_optimizers() -> None:
    for found in run_ranks(two_models, 2):
        torch.testing.assert_close(found, two_models(World()), rtol=0, atol=2e-5)


def fills_both_ways(world: World, folder: str) -> list[tuple[Tensor, int, list[str]]]:
    return [fills(world, folder, persistent_size) for persistent_size in (20, 0)]


def fills(world: World, folder: str, persistent_size: int) -> tuple[Tensor, int, list[str]]:
    problems: list[str] = []
    torch.manual_seed(world.rank)
    with torch.device("meta"):
        model = Language()
        model.scale = nn.Parameter(torch.ones(1))
    held = model.embed.weight
    values = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW([{"params": values[:3]}, {"params": values[3:], "weight_decay": 0.1}], lr=0.05)
    for options in ({"zero_stage": 2, "weights": folder}, {"zero_stage": 3}):
        accelerator = build(world, **options)
        with pytest.raises(MisuseError) as raised:
            accelerator.prepare(model, optimizer)
        problems.append(str(raised.value))
        accelerator.close()
    accelerator = build(world, zero_stage=3, persistent_size=persistent_size, weights=folder)
    accelerator.prepare(model, optimizer)
    run(accelerator, model, optimizer, range(3))
    parameters = accelerator.memory_map()["parameters"]
    accelerator.close()
    assert model.embed.weight is model.head.weight is held
    assert optimizer.state[held]["exp_avg"].shape == held.shape
    return flat(model), parameters, problems


def test_a_model_without_memory_is_filled_part_by_part(tmp_path: Path) -> None:
    model, _ = language()
    whole = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(whole, tmp_path / "model.safetensors")
    for found in run_ranks(fills_both_ways, 2, str(tmp_path)):
        for weights, _, problems in found:
            torch.testing.assert_close(weights, by_hand(range(3)), rtol=0, atol=2e-5)
            assert all("deepspeed.weights" in problem for problem in problems)
        assert found[1][1] < 0.7 * sum(value.nbytes for value in model.parameters())


def exports(world: World, folder: str) -> dict[str, Tensor]:
    model, optimizer = language()
    accelerator = build(world, zero_stage=3, persistent_size=0)
    accelerator.prepare(model, optimizer)
    run(accelerator, model, optimizer, range(2))
    with pytest.raises(MisuseError, match="floating point"):
        accelerator.save_model(model, folder, dtype=torch.int8)
    accelerator.save_model(model, folder, max_shard_size=200, dtype=torch.bfloat16)
    whole = accelerator.get_state_dict(model)
    accelerator.close()
    return whole


def test_weights_are_exported_in_16_bits_a_file_at_a_time(tmp_path: Path) -> None:
    expected = run_ranks(exports, 2, str(tmp_path))[0]
    files = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert len(files) > 2
    found = {name: value for file in files for name, value in file.items()}
    assert found.keys() == expected.keys() - {"head.weight"}  # which is tied, and there once
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].bfloat16(), rtol=0, atol=0)


class Centered(torch.optim.SGD):
    """An optimizer that subtracts the mean of each gradient."""

    def step(self, closure: Any = None) -> Any:
        for value in self.param_groups[0]["params"]:
            value.grad -= value.grad.mean()
        return super().step(closure)


def refusals(world: World) -> list[str]:
    def tell(*objects: Any, **options: Any) -> str:
        try:
            build(world, **options).prepare(*objects)
        except (ConfigError, MisuseError) as error:
            return str(error)
        return ""

    model, _ = language()
    half = list(model.parameters())
    double = nn.Linear(2, 2).double()
    pair = nn.Linear(2, 2), nn.Linear(2, 2)
    both = torch.optim.SGD([value for part in pair for value in part.parameters()], lr=0.1)
    return [
        tell(double, torch.optim.SGD(double.parameters(), lr=0.1)),
        tell(model, torch.optim.LBFGS(model.parameters())),
        tell(model, torch.optim.SGD(half[:1], lr=0.1), torch.optim.SGD(half[1:], lr=0.1), zero_stage=3),
        tell(model, torch.optim.SGD(half[:2], lr=0.1), torch.optim.SGD(half, lr=0.1)),
        tell(*pair, both, zero_stage=3),
        tell(*language(has_single=True), zero_stage=3),
        tell(model, Centered(model.parameters(), lr=0.1)),
    ]


def test_what_cannot_work_is_refused_before_training() -> None:
    for double, untested, two, twice, stage3, single, derived in run_ranks(refusals, 2):
        assert "float64" in double
        assert "LBFGS is not known to treat each element" in untested
        assert "two optimizers step the Language, and stage 3" in two
        assert "two optimizers step scale of the Language, and" in twice
        assert "--zero-stage 2" in stage3
        assert "scale of the Language is a single number" in single
        assert "Centered is not known to treat each element" in derived


def without_package(world: World) -> str:
    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # what an import of it finds then is nothing
    try:
        build(world)
    except ConfigError as error:
        return str(error)
    return ""


def test_without_the_package_there_is_one_clear_error() -> None:
    assert all("pip install 'accel_nb[deepspeed]'" in message for message in run_ranks(without_package, 2))


def fails_in_the_engine(world: World, stage: int) -> list[bool]:
    from accel_nb.strategies.deepspeed import engine

    model, optimizer = language()
    run_alone(model, optimizer, range(2))
    before = look_of(model, optimizer)
    accelerator = build(world, zero_stage=stage)
    initialize = engine.deepspeed.initialize
    engine.deepspeed.initialize = failing_after(initialize)
    with pytest.raises(ArithmeticError):
        accelerator.prepare(model, optimizer)
    engine.deepspeed.initialize = initialize
    found = [now == then for now, then in zip(look_of(model, optimizer), before, strict=True)]
    accelerator.prepare(model, optimizer)
    run(accelerator, model, optimizer, range(2, 4))
    accelerator.close()
    expected, again = language()
    run_alone(expected, again, range(4))
    return [*found, torch.allclose(flat(model), flat(expected), atol=2e-6)]


def failing_after(function: Callable[..., Any]) -> Callable[..., Any]:
    def fail(**options: Any) -> None:
        function(**options)
        raise ArithmeticError("half-way")

    return fail


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_that_fails_half_way_leaves_everything_as_it_was(stage: int) -> None:
    for facts in run_ranks(fails_in_the_engine, 2, stage):
        assert all(facts), facts


def accumulates(world: World) -> list[tuple[Tensor, Tensor]]:
    """Steps without `zero_grad`, gradients from before the preparation, and weights that are given other memory."""
    found = []
    for options in WAYS:
        model, optimizer = language("sgd")
        model.scale.tag = "own"  # type: ignore[attr-defined]
        for value in model.parameters():
            value.grad = torch.full_like(value, 0.01) if value.requires_grad else None
        accelerator = build(world, **options)
        accelerator.prepare(model, optimizer)
        optimizer.step()
        for number in range(3):
            x, y = tokens(number)
            accelerator.backward(loss_of(model, x[world.rank :: world.size], y[world.rank :: world.size]))
            optimizer.step()
        with sharded.collective_reads(accelerator.components.comm):
            steps = copy.deepcopy(optimizer.state_dict()["state"])
        if options["zero_stage"] < 3:
            model.embed.weight.data = model.embed.weight.data * 2
        model.scale.later = "own"  # type: ignore[attr-defined]
        optimizer.step()
        accelerator.close()
        assert vars(model.scale) == {"tag": "own", "later": "own"}
        found.append((flat(model), torch.cat([values["momentum_buffer"].flatten() for values in steps.values()])))
    return found


def accumulated_by_hand(*, doubles: bool) -> tuple[Tensor, Tensor]:
    model, optimizer = language("sgd")
    for value in model.parameters():
        value.grad = torch.full_like(value, 0.01) if value.requires_grad else None
    optimizer.step()
    for number in range(3):
        loss_of(model, *tokens(number)).backward()
        optimizer.step()
    buffers = [values["momentum_buffer"].flatten().clone() for values in optimizer.state_dict()["state"].values()]
    if doubles:
        model.embed.weight.data *= 2
    optimizer.step()
    return flat(model), torch.cat(buffers)


def test_steps_leave_gradients_to_which_later_passes_add() -> None:
    for found in run_ranks(accumulates, 2):
        for options, (weights, buffers) in zip(WAYS, found, strict=True):
            expected, momentum = accumulated_by_hand(doubles=options["zero_stage"] < 3)
            torch.testing.assert_close(buffers, momentum, rtol=0, atol=2e-5, msg=lambda t, o=options: f"{o}: {t}")
            torch.testing.assert_close(weights, expected, rtol=0, atol=2e-5, msg=lambda t, o=options: f"{o}: {t}")
