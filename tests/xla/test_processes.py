"""Processes with one chip each: alone, and averaging gradients through the communicator."""

from __future__ import annotations

import os

import pytest
from torch import Tensor

from accel_nb.runtime.world import World
from tests.contract.recipes import Recipe, assert_equal_weights, by_hand, explicit, plain
from tests.ranks.launch import run_ranks

RECIPES = [
    Recipe(num_samples=24),
    Recipe(num_samples=23, accumulate=2, clip=0.3, scheduler=True),
    Recipe(num_samples=13, reduction="sum", optimizer="adamw"),
]


def train(world: World, recipes: list[Recipe]) -> list[dict[str, dict[str, Tensor]]]:
    os.environ.pop("CPU_NUM_DEVICES", None)
    return [
        {"explicit": explicit(world, recipe, strategy="xla"), "plain": plain(world, recipe, strategy="xla")}
        for recipe in recipes
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_weights_equal_those_of_one_plain_process(size: int) -> None:
    for found in run_ranks(train, size, RECIPES, timeout_s=110):
        for recipe, ways in zip(RECIPES, found, strict=True):
            for weights in ways.values():
                assert_equal_weights(weights, by_hand(recipe))
