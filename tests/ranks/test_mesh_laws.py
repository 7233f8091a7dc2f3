"""Every mesh with every way of training: weights are those of one process, and checkpoints go on in every other mesh.

Some of each run in all tests, and with ``MESH=all`` all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.mesh_models import by_hand, flat, gpt, loss_of, optimizers
from tests.ranks.mesh_training import assert_equal_copies, batches, range_of, train
from tests.support.nightly import nightly

CLOSE = 1e-9
RUNS_ALL = os.environ.get("MESH") == "all"


@dataclass(frozen=True)
class Layout:
    """The number of workers, the sizes of their mesh, and the strategy."""

    size: int
    sizes: dict[str, int] = field(default_factory=dict)
    strategy: str = "ddp"
    hybrid: int | None = None

    def open(self, world: World, **options: Any) -> Accelerator:
        """Return an accelerator of this mesh."""
        config = {"mesh": self.sizes, "batch": "global", "fsdp": {"hybrid_shard_size": self.hybrid}}
        return Accelerator(world=world, cpu=True, strategy=self.strategy, config=config, **options)


BY_DAY = "pp x tp"

LAYOUTS = {
    "pp x tp": Layout(4, {"pp": 2, "tp": 2, "micro_batches": 3}),
    "cp x fsdp": Layout(4, {"cp": 2}, "fsdp"),
    "ep x tp": Layout(4, {"ep": 2, "tp": 2}),
}
if RUNS_ALL:
    LAYOUTS |= {
        "one": Layout(1, strategy="single"),
        "ddp": Layout(2),
        "fsdp": Layout(4, strategy="fsdp"),
        "tp": Layout(2, {"tp": 2}),
        "cp": Layout(2, {"cp": 2}),
        "pp": Layout(2, {"pp": 2}),
        "tp x fsdp": Layout(4, {"tp": 2}, "fsdp"),
        "cp x tp": Layout(4, {"cp": 2, "tp": 2}),
        "ep": Layout(2, {"ep": 2}),
        "ep x fsdp": Layout(4, {"ep": 2}, "fsdp"),
        "pp x dp": Layout(4, {"pp": 2, "micro_batches": 2}),
        "pp x fsdp": Layout(4, {"pp": 2, "micro_batches": 3}, "fsdp"),
        "hsdp x tp": Layout(8, {"tp": 2}, "fsdp", hybrid=2),
        "ep x cp x fsdp": Layout(4, {"ep": 4, "cp": 2}, "fsdp"),
        "ep x cp x tp": Layout(8, {"ep": 2, "cp": 2, "tp": 2}),
        "pp x fsdp x tp": Layout(8, {"pp": 2, "tp": 2, "micro_batches": 2}, "fsdp"),
    }


def sum_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


def token_loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean over the tokens that are not padding, of which each share of a batch has another number."""
    return F.cross_entropy(model(x).flatten(0, 1), y.masked_fill(y < 4, -100).flatten())


def masked_loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return a mean over tokens, of which the first half of the first batch has none."""
    losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    mask = ((y < 4) & (x[:, :1] < 6)).flatten()
    return (losses * mask).sum() / mask.sum()


@dataclass(frozen=True)
class Training:
    """A way of training, and properties of the model."""

    kind: str = "sgd"
    sizes: tuple[int, ...] = (8, 8, 8, 8)
    clip: float | None = None
    accumulate: int = 1
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = loss_of
    is_tied: bool = False
    is_frozen: bool = False

    def model(self) -> nn.Module:
        """Return the model to train, with layers, blocks, sequences and experts to divide."""
        return gpt(num_experts=4, is_tied=self.is_tied, is_frozen=self.is_frozen)

    def by_hand(self) -> Tensor:
        """Return the weights that training in this process leaves."""
        return by_hand(
            self.model(), self.kind, sizes=self.sizes, clip=self.clip, accumulate=self.accumulate, loss=self.loss
        )

    def on_ranks(self, world: World, layout: Layout) -> Tensor:
        """Train in a mesh, and return all weights."""
        model = self.model()
        made = optimizers(model, self.kind)
        accelerator = layout.open(world, gradient_accumulation_steps=self.accumulate)
        loader = batches(self.sizes)
        accelerator.prepare(model, loader, *made)
        train(accelerator, model, made, loader, self.clip, self.loss)
        assert_equal_copies(accelerator, model)
        accelerator.close()
        return flat(model)


TRAININGS = {
    "a sum": Training(loss=sum_of, clip=0.5),
    "a masked mean, all else too": Training("two", (8, 8, 8, 7), 0.05, 2, masked_loss_of, is_tied=True, is_frozen=True),
}
if RUNS_ALL:
    TRAININGS |= {
        "a mean over tokens": Training(loss=token_loss_of, sizes=(8, 8, 8, 7)),
        "a short last batch": Training(sizes=(8, 8, 8, 5)),
        "accumulation": Training(accumulate=2),
        "clipping": Training(clip=0.05),
        "a masked mean": Training(loss=masked_loss_of),
        "tokens in a window": Training(loss=token_loss_of, accumulate=2, clip=0.05),
        "a sum over a window": Training(loss=sum_of, accumulate=2, clip=0.5),
        "two optimizers": Training("two"),
        "a tied head": Training(is_tied=True),
        "frozen parts": Training(is_frozen=True),
    }


def train_ways(world: World, layout: Layout, names: list[str]) -> list[Tensor]:
    return [TRAININGS[name].on_ranks(world, layout) for name in names]


@pytest.mark.parametrize("mesh", [*map(nightly, [name for name in LAYOUTS if name != BY_DAY]), BY_DAY])
def test_weights_equal_those_of_one_process(mesh: str) -> None:
    layout, names = LAYOUTS[mesh], list(TRAININGS)
    expected = {name: training.by_hand() for name, training in TRAININGS.items()}
    for rank, found in enumerate(run_ranks(train_ways, layout.size, layout, names, timeout_s=300)):
        for name, weights in zip(names, found, strict=True):
            assert (weights - expected[name]).abs().max() < CLOSE, (mesh, name, rank)


def draw_dropout(world: World, layout: Layout) -> None:
    model = gpt(dropout=0.3, num_experts=4)
    made = optimizers(model, "adamw")
    accelerator = layout.open(world, seed=3)
    loader = batches((8,) * 20)
    accelerator.prepare(model, loader, *made)
    train(accelerator, model, made, loader)
    assert_equal_copies(accelerator, model)
    accelerator.close()


@pytest.mark.skipif(not RUNS_ALL, reason="tests of each dimension draw dropout too; MESH=all draws it in each mesh")
@pytest.mark.parametrize("mesh", LAYOUTS)
def test_copies_stay_equal_to_the_bit_over_20_steps_with_dropout(mesh: str) -> None:
    run_ranks(draw_dropout, LAYOUTS[mesh].size, LAYOUTS[mesh], timeout_s=300)


# --- checkpoints ---


def prepared(world: World, layout: Layout) -> tuple[nn.Module, list[Any], Accelerator]:
    model = gpt(num_experts=4)
    made = optimizers(model, "adamw")
    accelerator = layout.open(world)
    accelerator.prepare(model, *made)
    return model, made, accelerator


def save_half(world: World, layout: Layout, folder: Path) -> None:
    model, made, accelerator = prepared(world, layout)
    train(accelerator, model, made, range_of(accelerator, 0, 2))
    accelerator.save_state(folder)
    accelerator.close()


def go_on(world: World, layout: Layout, folders: list[Path]) -> list[Tensor]:
    found: list[Tensor] = []
    for folder in folders:
        model, made, accelerator = prepared(world, layout)
        accelerator.load_state(folder)
        train(accelerator, model, made, range_of(accelerator, 2, 4))
        accelerator.close()
        found.append(flat(model))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint of half of a training on each mesh."""
    parent = tmp_path_factory.mktemp("checkpoints")
    folders = [parent / mesh for mesh in LAYOUTS]
    for layout, folder in zip(LAYOUTS.values(), folders, strict=True):
        run_ranks(save_half, layout.size, layout, folder, timeout_s=100)
    return folders


@pytest.fixture(scope="module")
def whole() -> Tensor:
    """The weights after the whole training by hand."""
    return by_hand(gpt(num_experts=4), "adamw", sizes=(8, 8, 8, 8))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", LAYOUTS)
def test_checkpoints_of_every_mesh_go_on_in_every_other(mesh: str, saved: list[Path], whole: Tensor) -> None:
    for found in run_ranks(go_on, LAYOUTS[mesh].size, LAYOUTS[mesh], saved, timeout_s=500):
        for folder, weights in zip(saved, found, strict=True):
            assert (weights - whole).abs().max() < CLOSE, folder.name


def divide_rows_in_a_cell(world: World, mesh: dict[str, int]) -> str:
    """Train a plain loop on four ranks, and return the description of the prepared objects."""
    accelerator = Accelerator(world=world, cpu=True, config={"mesh": mesh})
    cells = PlainCells(accelerator)
    with cells.run_cell():
        model, loader = gpt(dropout=0.2), batches((8, 8))
        [optimizer] = optimizers(model, "sgd")
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        found = str(accelerator.describe()["objects"])
    accelerator.close()
    return found


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_trials_and_checks_are_not_taken_for_code_of_the_model(mesh: dict[str, int]) -> None:
    for found in run_ranks(divide_rows_in_a_cell, 4, mesh):
        assert "batch 8 = 2 x 4 rows" in found
