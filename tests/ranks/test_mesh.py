"""Layers that several ranks compute together: the weights are those of one process."""

from __future__ import annotations

from typing import Any

import torch

from accel_nb.accelerator import Accelerator
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.mesh_models import by_hand, flat, gpt, loss_of, optimizers, tokens

SIZES = (8, 8, 8, 8)


def build(world: World, tp: int = 2, **options: Any) -> Accelerator:
    config = {"mesh": {"tp": tp}, **options.pop("config", {})}
    return Accelerator(world=world, cpu=True, config=config, **options)


def train(accelerator: Accelerator, model: Any, made: list[Any], sizes: tuple[int, ...], clip: float | None) -> None:
    share = accelerator.components.data_world
    for number, size in enumerate(sizes):
        x, y = tokens(number, size)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x[share.rank :: share.size], y[share.rank :: share.size]))
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()


def one_case(world: World, kind: str, strategy: str, clip: float | None, accumulate: int) -> torch.Tensor:
    model = gpt()
    if not world.is_main:
        with torch.no_grad():
            model.embed.weight.zero_()  # rank 0's weights become everyone's
    made = optimizers(model, kind)
    accelerator = build(world, strategy=strategy, gradient_accumulation_steps=accumulate)
    accelerator.prepare(model, *made)
    train(accelerator, model, made, SIZES, clip)
    accelerator.close()
    assert model.head.weight is model.embed.weight
    return flat(model)


CASES = [("adamw", "auto", None, 1), ("sgd", "fsdp", 0.05, 1), ("two", "ddp", 0.05, 2)]


def cases(world: World) -> list[torch.Tensor]:
    return [one_case(world, *case) for case in CASES]


def test_weights_equal_those_of_one_process() -> None:
    for size in (2, 4):
        results = run_ranks(cases, size, timeout_s=120)
        for number, (kind, _, clip, accumulate) in enumerate(CASES):
            expected = by_hand(gpt(), kind, sizes=SIZES, clip=clip, accumulate=accumulate)
            for rank, found in enumerate(results):
                difference = (found[number] - expected).abs().max().item()
                print(size, CASES[number], rank, difference)
                assert difference < 1e-9, (size, CASES[number], rank)
