"""With ``strategy=auto`` the memory decides how a training is shared, or that it does not start."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.accelerator.prepare import strategy_choice
from accel_nb.errors import ConfigError
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.support.transformer import Transformer

LENGTH = 16


def training(width: int = 64) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(3)
    model = Transformer(64, width, 4, LENGTH, tied=False).double()
    tokens = torch.randint(64, (2, 8, LENGTH))
    loader = DataLoader(TensorDataset(*tokens), batch_size=4)
    return model, torch.optim.AdamW(model.parameters(), 0.01), loader


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())


def flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def build(world: World, memory: str | None, *, asked: bool = True, **config: Any) -> Accelerator:
    options = {"memory": memory} if memory else {}
    return Accelerator(
        world=world, cpu=True, strategy="auto" if asked else None, batch="global", config={**options, **config}
    )


def by_hand() -> Tensor:
    model, optimizer, loader = training()
    for x, y in loader:
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def trains(world: World, memory: str | None, is_plain: bool) -> tuple[str, list[str], Tensor]:
    model, optimizer, loader = training()
    accelerator = build(world, memory)

    def train() -> tuple[str, list[str]]:
        for x, y in loader:
            loss = loss_of(model(x), y)
            loss.backward() if is_plain else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        facts = accelerator.describe()
        return facts["strategy"], [note for note in facts["notes"] if note.startswith("plan ")]

    if is_plain:
        cells = PlainCells(accelerator)
        with cells.run_cell():
            cells.prepare(locals(), ["model", "optimizer", "loader"])
            strategy, notes = train()
    else:
        accelerator.prepare(model, optimizer, loader)
        strategy, notes = train()
    accelerator.close()
    return strategy, notes, flat(model)


def decides(world: World) -> dict[str, Any]:
    """Ask several plans of one world; nothing of one is left for the next."""
    found: dict[str, Any] = {"roomy": trains(world, "1GiB", False), "tight": trains(world, "7.5MiB", True)}
    model, optimizer, loader = training()
    accelerator = build(world, "1MiB")
    try:
        accelerator.prepare(model, optimizer, loader)
    except ConfigError as error:
        found["refused"] = str(error)
    found["untouched"] = type(model) is Transformer and not accelerator.prepared_objects
    accelerator.close()

    accelerator = build(world, None, asked=False)
    accelerator.prepare(*training())
    found["default"] = accelerator.describe()["strategy"], accelerator.describe()["notes"]
    accelerator.close()

    accelerator = build(world, "7.5MiB", fsdp={"hybrid_shard_size": 1})
    try:
        accelerator.prepare(*training())
    except ConfigError as error:
        found["hybrid"] = str(error)
    accelerator.close()

    model, _, loader = training()
    pair = torch.optim.SGD(model.blocks.parameters(), 0.1), torch.optim.SGD(model.head.parameters(), 0.1)
    accelerator = build(world, "7.5MiB")
    accelerator.prepare(model, *pair, loader)
    found["two plain optimizers"] = accelerator.describe()["notes"]
    accelerator.close()

    accelerator = build(world, "7.5MiB", fsdp={"reshard_after_forward": False}, activation_checkpointing=True)
    accelerator.prepare(*training())
    found["given"] = accelerator.describe()["notes"]
    accelerator.free_memory()
    small = nn.Linear(4, 4)
    accelerator.prepare(small, torch.optim.SGD(small.parameters(), 0.1))
    found["anew"] = accelerator.describe()["strategy"], accelerator.describe()["notes"]
    accelerator.close()

    for name, memory in (("refused one", "4MiB"), ("refused all", "3.5MiB")):
        model, _, loader = training()
        model.float()
        pair = torch.optim.AdamW(model.blocks.parameters()), torch.optim.AdamW(model.head.parameters())
        accelerator = build(world, memory, fsdp={"hybrid_shard_size": 1})
        try:
            accelerator.prepare(model, *pair, loader)
            found[name] = accelerator.describe()["notes"][0]
        except ConfigError as error:
            found[name] = str(error)
        accelerator.close()
    return found


def test_the_cheapest_plan_that_fits_is_taken_and_follows_what_was_given() -> None:
    expected = by_hand()
    for found in run_ranks(decides, 2):
        for name, strategy, words in (
            ("roomy", "ddp", "plan ddp (--strategy ddp): the simplest way fits"),
            ("tight", "fsdp", "plan fsdp (3) (--strategy fsdp): ddp lacks"),
        ):
            used, notes, weights = found[name]
            assert used == strategy
            assert notes[0].startswith(words)
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-8)
        assert found["refused"].startswith("nothing fits: fsdp (3) + activation checkpointing lacks")
        assert "on each rank" in found["refused"]
        assert found["untouched"]
        assert found["default"][0] == "ddp"
        assert not any("fits" in note for note in found["default"][1])
        assert found["hybrid"].startswith("nothing fits")  # each rank holds all of it
        assert found["two plain optimizers"][0].startswith("plan ddp")  # which keep nothing, as AdamW would
        assert found["given"][0].startswith("plan fsdp (2) + activation checkpointing")
        assert any("recompute their activations" in note for note in found["given"])
        why = "zero 3 was not chosen: two optimizers step the Transformer, and stage 3 shards all of a model for one"
        assert found["refused one"].startswith("plan ddp + activation checkpointing (")
        has_zero = find_spec("deepspeed") is not None  # an extra
        assert found["refused one"].endswith(why) or not has_zero
        assert found["refused all"].startswith("nothing fits: ddp + activation checkpointing lacks")
        assert why in found["refused all"] or not has_zero
        assert found["anew"][0] == "ddp"
        assert "no batch is known" in found["anew"][1][0]


class Counted(Dataset[Tensor]):
    """Data that draw random numbers, and count how often they were asked."""

    num_reads = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        type(self).num_reads += 1
        return torch.randn(4)


def test_one_sample_is_looked_at_and_random_numbers_stay() -> None:
    model = nn.Linear(4, 4)
    accelerator = build(World(), "1GiB")
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(Counted(), batch_size=4))
    torch.testing.assert_close(torch.randn(3), expected)
    assert Counted.num_reads == 1
    accelerator.close()


def test_an_error_in_the_choice_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such layer")

    monkeypatch.setattr(strategy_choice, "check_refusals", fail)
    accelerator = build(World(), "1GiB")
    model = nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert "no plan: RuntimeError: no such layer" in accelerator.describe()["notes"]
    accelerator.close()


def test_a_strategy_that_was_named_makes_a_memory_idle() -> None:
    accelerator = Accelerator(world=World(), cpu=True, strategy="single", config={"memory": "1GiB"})
    assert any("memory" in note and "strategy is single" in note for note in accelerator.resolved.notes)
    accelerator.close()
