"""A model that is divided among ranks trains as a whole one, whatever it is made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.world import World
from accel_nb.telemetry.memory import storage_bytes
from tests.ranks.language_model import VOCABULARY, Language, flat, loss_of, tokens
from tests.ranks.launch import run_ranks
from tests.support.nightly import nightly


def language(optimizer: str = "adamw") -> tuple[Language, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Language().double()
    parameters = [value for value in model.parameters() if value.requires_grad]
    if optimizer == "adamw":
        return model, torch.optim.AdamW(parameters, lr=0.05)
    return model, torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


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


def build(world: World, strategy: str = "fsdp", **options: Any) -> Accelerator:
    return Accelerator(world=world, cpu=True, strategy=strategy, config={strategy: options})


def trains(world: World, options: dict[str, Any], kind: str, is_compiled: bool = False) -> Tensor:
    model, optimizer = language(kind)
    if not world.is_main:
        with torch.no_grad():
            model.embed.weight.zero_()  # rank 0's weights become everyone's
    accelerator = build(world, **options)
    called = torch.compile(model, backend="eager") if is_compiled else model
    accelerator.prepare(called, optimizer)
    run(accelerator, called, optimizer, range(4))
    with torch.no_grad():
        called(tokens(0)[0])  # an evaluation in between leaves no trace
    assert all(sharded.is_sharded(value) or value.dim() == 0 for value in called.parameters())
    run(accelerator, called, optimizer, range(4, 6))
    accelerator.close()
    assert model.head.weight is model.embed.weight
    return flat(model)


WAYS: dict[int, list[dict[str, Any]]] = {
    2: [
        {},
        {"wrap": "size", "min_params": 20},
        {"wrap": "classes", "classes": ["Block", "LayerNorm"]},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
    ],
    3: [{"wrap": "model"}],
    4: [{"hybrid_shard_size": 2}],
}


def trains_in_each_way(world: World) -> list[Tensor]:
    return [trains(world, options, kind) for options, kind in itertools.product(WAYS[world.size], ["adamw", "sgd"])]


def trains_compiled(world: World) -> Tensor:
    return trains(world, {}, "adamw", is_compiled=True)


def test_a_compiled_model_trains_as_one_process() -> None:
    expected = by_hand(range(6))
    for weights in run_ranks(trains_compiled, 2):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("size", WAYS)
def test_training_equals_one_process(size: int) -> None:
    for found in run_ranks(trains_in_each_way, size):
        for weights, (options, kind) in zip(found, itertools.product(WAYS[size], ["adamw", "sgd"]), strict=True):
            expected = by_hand(range(6), kind)
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-8, msg=lambda t, o=options: f"{o}: {t}")


def clips(world: World, options: dict[str, Any]) -> tuple[Tensor, list[float]]:
    model, optimizer = language()
    accelerator = build(world, **options)
    accelerator.prepare(model, optimizer)
    norms = []
    for number in range(3):
        x, y = tokens(number)
        accelerator.backward(loss_of(model, x[world.rank :: world.size], y[world.rank :: world.size]))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), float("inf"), float("inf"))))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.close()
    return flat(model), norms


@pytest.mark.parametrize(("size", "options"), [(2, {}), (4, {"hybrid_shard_size": 2})], ids=str)
def test_norms_are_those_of_the_whole_model(size: int, options: dict[str, Any]) -> None:
    model, _ = language()
    loss_of(model, *tokens(0)).backward()
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    for weights, norms in run_ranks(clips, size, options):
        assert norms[0] == pytest.approx(float(nn.utils.get_total_norm(gradients, float("inf"))))
        assert norms[1] == pytest.approx(float(nn.utils.get_total_norm(gradients)))
        torch.testing.assert_close(weights, by_hand(range(3), clip=0.05), rtol=0, atol=1e-8)


def clips_one_row(world: World) -> list[tuple[float, str]]:
    """Clip gradients of a layer of one row, of which the second rank holds nothing, in float64 and bf16."""
    found: list[tuple[float, str]] = []
    for dtype in (torch.float64, torch.bfloat16):
        model = nn.Linear(3, 1).to(dtype)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        accelerator = build(world)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 3, dtype=dtype)).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        found.append((round(float(norm), 6), str(norm.dtype)))
        accelerator.close()
    return found


def test_a_rank_without_a_shard_adds_to_the_norm_in_its_dtype() -> None:
    assert run_ranks(clips_one_row, 2) == [[(4.0, "torch.float64"), (4.0, "torch.bfloat16")]] * 2


class Single(nn.Module):
    """A model with a factor, and a number that takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def train_single() -> tuple[list[float], float, bool]:
    torch.manual_seed(0)
    model = Single().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients: list[float] = []
    optimizer.zero_grad()
    for _ in range(2):
        model(x).square().mean().backward()
        gradients.append(float(model.scale.grad))  # pyright: ignore[reportArgumentType]
    optimizer.step()
    return gradients, model.unused.item(), model.unused.grad is None


def single_in_a_cell(world: World) -> tuple[list[float], float, bool]:
    accelerator = Accelerator(world=world, cpu=True, strategy="fsdp")
    with PlainCells(accelerator).run_cell():
        found = train_single()
    accelerator.close()
    return found


def test_single_numbers_have_the_gradients_of_one_process_after_each_pass() -> None:
    gradients, *others = train_single()
    for found, *rest in run_ranks(single_in_a_cell, 2):
        assert found == pytest.approx(gradients, abs=1e-12)
        assert rest == others == [2.0, True]


def shares_memory(world: World) -> tuple[int, int, int]:
    model, optimizer = language()
    whole = storage_bytes(model.parameters())
    accelerator = build(world)
    accelerator.prepare(model, optimizer)
    run(accelerator, model, optimizer, range(1))
    held = storage_bytes(model.parameters())
    state = storage_bytes(value for entries in optimizer.state.values() for value in entries.values() if value.dim())
    accelerator.close()
    return whole, held, state


def test_each_rank_holds_its_part() -> None:
    for whole, held, state in run_ranks(shares_memory, 2):
        assert held < 0.6 * whole
        assert state < 2 * 0.6 * whole


def in_turn(world: World) -> list[Tensor]:
    """Train a model, then another that was frozen at first, with an optimizer of each; then only one of both."""
    (first, one), (second, two) = language(), language("sgd")
    second.requires_grad_(False)
    accelerator = build(world)
    accelerator.prepare(first, one, second, two)
    run(accelerator, first, one, range(2))
    second.embed.requires_grad_(True)
    accelerator.components.preparer.refresh()
    run(accelerator, second, two, range(2))
    run(accelerator, first, one, range(2, 4))
    accelerator.close()
    return [flat(first), flat(second)]


def test_several_models_and_parameters_that_thaw() -> None:
    second, two = language("sgd")
    second.requires_grad_(False)
    second.embed.requires_grad_(True)
    for number in range(2):
        loss_of(second, *tokens(number)).backward()
        two.step()
        two.zero_grad()
    for found in run_ranks(in_turn, 2):
        torch.testing.assert_close(found[0], by_hand(range(4)), rtol=0, atol=1e-8)
        torch.testing.assert_close(found[1], flat(second), rtol=0, atol=1e-8)


def saves(world: World, strategy: str, folder: str, held: bool) -> Tensor:
    model, optimizer = language()
    accelerator = Accelerator(world=world, cpu=True, strategy=strategy, gradient_accumulation_steps=2 if held else 1)
    accelerator.prepare(model, optimizer)
    steps(accelerator, model, optimizer, range(3))
    accelerator.save_state(f"{folder}/saved")
    accelerator.save_model(model, f"{folder}/plain")
    steps(accelerator, model, optimizer, range(3, 6))
    accelerator.close()
    return flat(model)


def loads(world: World, strategy: str, folder: str, held: bool) -> Tensor:
    model, optimizer = language()
    accelerator = Accelerator(world=world, cpu=True, strategy=strategy, gradient_accumulation_steps=2 if held else 1)
    accelerator.prepare(model, optimizer)
    steps(accelerator, model, optimizer, range(7, 8))
    optimizer.zero_grad()
    accelerator.load_state(f"{folder}/saved")
    steps(accelerator, model, optimizer, range(3, 6))
    accelerator.close()
    return flat(model)


def steps(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    rank, size = accelerator.process_index, accelerator.num_processes
    for number in numbers:
        x, y = tokens(number)
        with accelerator.accumulate():
            accelerator.backward(loss_of(model, x[rank::size], y[rank::size]))
            optimizer.step()
            optimizer.zero_grad()


PAIRS = [
    ("fsdp", 2, "fsdp", 2),
    ("fsdp", 2, "fsdp", 3),
    ("fsdp", 2, "ddp", 3),
    ("fsdp", 3, "single", 1),
    ("ddp", 2, "fsdp", 3),
    ("single", 1, "fsdp", 2),
]


def one_after_the_other(world: World, fn: Callable[..., Tensor], given: list[tuple[Any, ...]]) -> list[Tensor]:
    return [fn(world, *args) for args in given]


@pytest.mark.parametrize("held", [nightly(False), True], ids=["between steps", "in an open window"])
def test_what_one_strategy_saves_another_goes_on_with(held: bool, tmp_path: Path) -> None:
    def folder(strategy: str, size: int) -> str:
        return str(tmp_path / f"{strategy} {size}")

    def on(fn: Callable[..., Tensor], size: int, given: list[tuple[Any, ...]]) -> list[list[Tensor]]:
        args = (fn, given)
        return run_ranks(one_after_the_other, size, *args) if size > 1 else [one_after_the_other(World(), *args)]

    expected: dict[tuple[str, int], Tensor] = {}
    savers = sorted({(saver, before) for saver, before, _, _ in PAIRS})
    for size in sorted({before for _, before in savers}):
        here = [saver for saver, before in savers if before == size]
        found = on(saves, size, [(saver, folder(saver, size), held) for saver in here])[0]
        expected.update({(saver, size): weights for saver, weights in zip(here, found, strict=True)})
    for size in sorted({after for *_, after in PAIRS}):
        pairs = [(saver, before, loader) for saver, before, loader, after in PAIRS if after == size]
        for weights in on(loads, size, [(loader, folder(saver, before), held) for saver, before, loader in pairs]):
            for pair, value in zip(pairs, weights, strict=True):
                wanted = expected[pair[:2]]
                torch.testing.assert_close(value, wanted, rtol=0, atol=1e-8, msg=lambda t, p=pair: f"{p}: {t}")
    for saver in savers if not held else ():
        weights = load_file(Path(folder(*saver)) / "plain" / "model.safetensors")
        torch.testing.assert_close(weights["embed.weight"].flatten(), by_hand(range(3))[1:67])
        assert weights["scale"].shape == ()


def keeps_parameters(world: World) -> tuple[bool, Tensor, str]:
    model, optimizer = language()
    weight, whole = model.embed.weight, {name: value.clone() for name, value in model.state_dict().items()}
    accelerator = build(world, forward_methods=["encode"])
    accelerator.prepare(model, optimizer)
    assert model.encode(tokens(0)[0]).shape == (12, 5, 6)
    run(accelerator, model, optimizer, range(2))
    model.load_state_dict(whole)
    found = accelerator.get_state_dict(model)
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    problem = ""
    try:
        __import__("copy").deepcopy(model)
    except MisuseError as error:
        problem = str(error)
    accelerator.close()
    return model.embed.weight is weight, flat(model), problem


def test_parameters_are_the_same_objects_afterwards_and_whole_states_load() -> None:
    for is_same, weights, problem in run_ranks(keeps_parameters, 2):
        assert is_same
        torch.testing.assert_close(weights, flat(language()[0]))
        assert "get_state_dict" in problem


BAD: list[tuple[dict[str, Any], str]] = [
    ({"wrap": "classes", "classes": ["Blok"]}, "did you mean Block?"),
    ({"wrap": "classes"}, "fsdp.classes"),
    ({"hybrid_shard_size": 3}, "does not divide the 2 workers; use one of 1, 2"),
    ({"forward_methods": ["decode"]}, "decode"),
]


def refused(world: World) -> list[str]:
    found: list[str] = []
    for options, _ in BAD:
        model, optimizer = language()
        with pytest.raises((ConfigError, MisuseError)) as raised:
            build(world, **options).prepare(model, optimizer)
        found.append(str(raised.value))
    return found


def test_bad_options_are_refused_before_training() -> None:
    for messages in run_ranks(refused, 2):
        assert all(words in message for message, (_, words) in zip(messages, BAD, strict=True)), messages


def skips_part(world: World) -> Tensor:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    holder = Chooser(model)
    optimizer = torch.optim.SGD(holder.parameters(), lr=0.1)
    accelerator = build(world, average_unused=True)
    accelerator.prepare(holder, optimizer)
    accelerator.backward(holder("a" if world.is_main else "b", torch.ones(2, 3)).mean())
    optimizer.step()
    accelerator.close()
    return flat(holder)


class Chooser(nn.Module):
    """Uses one of its parts."""

    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, name: str, x: Tensor) -> Tensor:
        return self.parts[name](x)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this PyTorch refuses fsdp.average_unused"
)
def test_ranks_that_use_different_parameters_agree() -> None:
    torch.manual_seed(0)
    model = Chooser(nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}))
    ((model("a", torch.ones(2, 3)).mean() + model("b", torch.ones(2, 3)).mean()) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found in run_ranks(skips_part, 2):
        torch.testing.assert_close(found, flat(model))


def fills(world: World, folder: str, offloads: bool) -> tuple[Tensor, int, list[str]]:
    problems: list[str] = []
    torch.manual_seed(world.rank)
    with torch.device("meta"):
        model = Language().double()
        other = nn.Sequential(nn.Linear(6, VOCABULARY), nn.Linear(2, 2))
    model.blocks[1].requires_grad_(False)
    held = model.embed.weight
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=0.05)
    for options in ({}, {"weights": folder}):
        accelerator = build(world, **options)
        try:
            accelerator.prepare(other)
        except (ConfigError, MisuseError) as error:
            problems.append(str(error))
        accelerator.close()
    accelerator = build(world, weights=folder, cpu_offload=offloads)
    accelerator.prepare(model, optimizer)
    bytes_held = storage_bytes(model.parameters())
    run(accelerator, model, optimizer, range(3))
    accelerator.close()
    assert model.embed.weight is held
    assert model.head.weight is held
    return flat(model), bytes_held, problems


def fills_both_ways(world: World, folder: str) -> list[tuple[Tensor, int, list[str]]]:
    return [fills(world, folder, offloads) for offloads in (False, True)]


def test_a_model_without_memory_is_filled_part_by_part(tmp_path: Path) -> None:
    model, _ = language()
    whole = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(whole, tmp_path / "model.safetensors")
    for weights, held, problems in itertools.chain(*run_ranks(fills_both_ways, 2, str(tmp_path))):
        torch.testing.assert_close(weights, by_hand(range(3)), rtol=0, atol=1e-8)
        assert held < 0.6 * storage_bytes(model.parameters())
        assert "fsdp.weights" in problems[0]
        assert "has no tensor 0.weight" in problems[1]
        assert "has no tensor 1.bias" in problems[1]


def fills_a_shared_buffer(world: World, folder: str) -> tuple[bool, list[float]]:
    with torch.device("meta"):
        layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        table = torch.empty(3)
    for layer in layers:
        layer.register_buffer("table", table)
    model = nn.Sequential(*layers)
    accelerator = build(world, weights=folder)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    tables = [layer.get_buffer("table") for layer in layers]
    accelerator.close()
    return tables[0] is tables[1], tables[0].tolist()


def test_a_buffer_of_two_modules_without_memory_stays_one_tensor(tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict()
    save_file({**whole, "0.table": torch.arange(3.0)}, tmp_path / "model.safetensors")
    assert run_ranks(fills_a_shared_buffer, 2, str(tmp_path)) == [(True, [0.0, 1.0, 2.0])] * 2


def test_a_model_without_memory_is_refused_where_it_stays_whole() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(MisuseError, match=r"weight of the Linear has no values .* fsdp\.weights"):
        Accelerator(cpu=True).prepare(model)
