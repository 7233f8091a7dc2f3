"""Training on N workers gives the weights that one process would have."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from accel_nb.runtime.world import World
from tests.contract.recipes import (
    COARSE,
    EXACT,
    Recipe,
    assert_equal_weights,
    by_hand,
    explicit,
    plain,
    tolerance,
)
from tests.ranks.launch import run_ranks
from tests.support.nightly import nightly

GRID = [
    Recipe(num_samples=samples, accumulate=accumulate, clip=clip, scheduler=True)
    for samples, accumulate, clip in itertools.product((24, 23, 13), (1, 2, 3), (None, 0.3))
]
# Autocast rounds each product, whichever rank computes it: weights agree to that, and far below what a step changes.
HALF = [
    Recipe(num_samples=samples, accumulate=accumulate, clip=clip, scheduler=True, precision=precision)
    for samples, accumulate, clip, precision in itertools.product((24, 23), (1, 2), (None, 0.3), ("bf16", "fp16"))
]
# What cannot be compared closely is not looked at in every corner: a tail, windows, clipping, each precision.
FEW = [
    Recipe(accumulate=2, clip=0.3, scheduler=True),
    Recipe(accumulate=2, clip=0.3, precision="fp16"),
    Recipe(accumulate=2, precision="bf16"),
    Recipe(reduction="sum", accumulate=3),
]
MORE = [Recipe(optimizer="adamw", accumulate=2), Recipe(reduction="sum"), Recipe(reduction="sum", accumulate=3)]


ALL = GRID + HALF + MORE
# Of the options of GRID and HALF each value stands beside each value of each other one.
PAIRS = [recipe for number, recipe in enumerate(GRID) if (number // 6 + number // 2 % 3 + number) % 2 == 0]
PAIRS += [recipe for number, recipe in enumerate(HALF) if bin(number).count("1") % 2 == 0]
LEFT_TO_NIGHT = [("ddp", 2), ("fsdp", 3)]
"""Worlds that differ only in size from others."""


def _worlds() -> list[Any]:
    """Return strategies, sizes and recipes: by day one size of each strategy, with each pair of options."""
    exact = [place for place in EXACT if place not in LEFT_TO_NIGHT]
    coarse = [place for place in COARSE if place[1] == 2]
    by_night = [nightly(*place, ALL) for place in EXACT]
    return [*[(*place, PAIRS + MORE) for place in exact], *[(*place, [*FEW, MORE[0]]) for place in coarse], *by_night]


def train_all(world: World, strategy: str, recipes: list[Recipe]) -> list[dict[str, object]]:
    """Run every recipe in one launch: a process group may serve any number of runs."""
    return [
        {
            "explicit": explicit(world, recipe, strategy=strategy),
            "plain": plain(world, recipe, strategy=strategy),
            "zero first": plain(world, recipe, strategy=strategy, zero_first=True),
        }
        for recipe in recipes
    ]


@pytest.mark.parametrize(("strategy", "size", "recipes"), _worlds())
def test_weights_equal_those_of_one_plain_process(strategy: str, size: int, recipes: list[Recipe]) -> None:
    per_rank = (
        run_ranks(train_all, size, strategy, recipes, timeout_s=240)
        if size > 1
        else [train_all(World(), strategy, recipes)]
    )
    for number, recipe in enumerate(recipes):
        expected = by_hand(recipe)
        for rank, (way, found) in itertools.product(range(size), per_rank[0][number].items()):
            found = per_rank[rank][number][way]
            try:
                assert_equal_weights(
                    found, expected, atol=tolerance(strategy, 1e-6) if recipe.compute is None else 2e-3
                )
            except AssertionError as error:
                raise AssertionError(f"{way}, rank {rank} of {size}, {recipe}") from error
