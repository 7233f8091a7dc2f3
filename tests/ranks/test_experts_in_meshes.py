"""Experts that are divided together with layers or sequences: the weights are those of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # imported once, before ranks are forked
from torch import Tensor, nn

from accel_nb.accelerator import Accelerator
from accel_nb.errors import ConfigError
from accel_nb.runtime.mesh import arrange
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.mesh_models import Attention, Gpt, by_hand, flat, optimizers
from tests.ranks.test_experts import Mixture
from tests.ranks.test_mesh import assert_equal_copies, batches, range_of, train

CLOSE = 1e-9


class SparseBlock(nn.Module):
    """A block of a small GPT with a mixture of experts in place of its dense layers."""

    def __init__(self, num_heads: int, _dropout: float) -> None:
        super().__init__()
        self.norm, self.attention, self.mixture = nn.LayerNorm(8), Attention(num_heads), Mixture(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixture(x + self.attention(self.norm(x)))


def sparse_gpt() -> Gpt:
    """Return a GPT whose second block has experts, and whose first has dense layers."""
    torch.manual_seed(5)
    model = Gpt()
    model.blocks[1] = SparseBlock(4, 0.0)
    return model.double()


def build(world: World, mesh: dict[str, int], **options: Any) -> Accelerator:
    return Accelerator(world=world, cpu=True, config={"mesh": mesh, "batch": "global"}, **options)


def one_case(world: World, mesh: dict[str, int], kind: str, strategy: str, clip: float | None, steps: int) -> Tensor:
    model = sparse_gpt()
    made = optimizers(model, kind)
    accelerator = build(world, mesh, strategy=strategy, gradient_accumulation_steps=steps)
    loader = batches((8, 8, 8, 8))
    accelerator.prepare(model, loader, *made)
    train(accelerator, model, made, loader, clip)
    assert_equal_copies(accelerator, model)
    described = str(accelerator.describe()["notes"])
    assert f"ep {mesh['ep']}" in described
    assert "on each worker, in 1 modules" in described
    accelerator.close()
    return flat(model)


LAYERS, SEQUENCES, BOTH = {"ep": 2, "tp": 2}, {"ep": 2, "cp": 2}, {"ep": 2, "tp": 2, "cp": 2}
CASES: list[tuple[Any, ...]] = [
    (LAYERS, "adamw", "auto", None, 1),
    (LAYERS, "two", "fsdp", 0.05, 2),
    (SEQUENCES, "adamw", "ddp", None, 1),
    (SEQUENCES, "two", "fsdp", 0.05, 2),
    ({"ep": 4, "cp": 2}, "sgd", "fsdp", 0.05, 1),
]
GROUPS = [(4, CASES)]
if os.environ.get("MESH") == "all":
    GROUPS.append((8, [*CASES, (BOTH, "sgd", "fsdp", 0.05, 1), (BOTH, "adamw", "ddp", None, 2)]))


def train_cases(world: World, cases: list[Any]) -> list[Tensor]:
    return [one_case(world, *case) for case in cases]


@pytest.mark.parametrize(("size", "cases"), GROUPS)
def test_weights_equal_those_of_one_process(size: int, cases: list[Any]) -> None:
    expected = [
        by_hand(sparse_gpt(), kind, sizes=(8, 8, 8, 8), clip=clip, accumulate=steps)
        for _, kind, _, clip, steps in cases
    ]
    for rank, found in enumerate(run_ranks(train_cases, size, cases, timeout_s=120)):
        for case, weights, wanted in zip(cases, found, expected, strict=True):
            assert (weights - wanted).abs().max() < CLOSE, (size, case, rank)


def continue_checkpoints(world: World, folder: Path) -> None:
    """Save in one mesh, and go on in another."""
    expected = by_hand(sparse_gpt(), "adamw", sizes=(8, 8, 8, 8))
    meshes: list[dict[str, int]] = [LAYERS, SEQUENCES, {"ep": 4}]
    for number, saved in enumerate(meshes):
        loaded = meshes[(number + 1) % len(meshes)]
        for mesh, first in ((saved, 0), (loaded, 2)):
            model = sparse_gpt()
            made = optimizers(model, "adamw")
            accelerator = build(world, mesh)
            accelerator.prepare(model, *made)
            if first:
                accelerator.load_state(folder / str(number))
            train(accelerator, model, made, range_of(accelerator, first, first + 2))
            if not first:
                accelerator.save_state(folder / str(number))
            accelerator.close()
        assert (flat(model) - expected).abs().max() < CLOSE, (saved, loaded)


def test_checkpoints_load_in_other_meshes(tmp_path: Path) -> None:
    run_ranks(continue_checkpoints, 4, tmp_path, timeout_s=200)


def test_meshes_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="experts are not divided among workers of stages"):
        build(World(size=4), {"ep": 2, "pp": 2})
    with pytest.raises(
        ConfigError, match=r"mesh\.ep is 4, which does not divide the 2 workers that 4 leave for mesh\.tp 2"
    ):
        arrange(0, 4, tp=2, ep=4)
