"""Models whose sequences several ranks compute together: the weights are those of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # imported once, before ranks are forked
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from accel_nb.accelerator import Accelerator
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.mesh_models import VOCABULARY, by_hand, flat, gpt, optimizers, tokens
from tests.ranks.test_mesh import assert_equal_copies, batches, range_of, train

SIZES = (8, 8, 8, 7)
CLOSE = 1e-9


def build(world: World, cp: int = 2, tp: int = 1, **options: Any) -> Accelerator:
    config = {"mesh": {"cp": cp, "tp": tp}, "batch": "global", **options.pop("config", {})}
    return Accelerator(world=world, cpu=True, config=config, **options)


def one_case(world: World, kind: str, strategy: str, clip: float | None, accumulate: int, tp: int = 1) -> Tensor:
    model = gpt()
    made = optimizers(model, kind)
    accelerator = build(world, tp=tp, strategy=strategy, gradient_accumulation_steps=accumulate)
    loader = batches(SIZES)
    accelerator.prepare(model, loader, *made)
    lengths: list[int] = []
    hook = model.blocks[0].attention.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    train(accelerator, model, made, loader, clip)
    hook.remove()
    assert set(lengths) == {3 if accelerator.components.groups.cp.world.rank == 0 else 2}
    assert_equal_copies(accelerator, model)
    whole = accelerator.get_state_dict(model)
    accelerator.close()
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(whole[name], value) for name, value in model.state_dict().items())
    assert type(model.blocks[0]).__call__ is nn.Module.__call__
    return flat(model)


CASES: list[tuple[Any, ...]] = [("adamw", "auto", None, 1), ("two", "ddp", 0.05, 2), ("sgd", "fsdp", 0.05, 1)]


def train_cases(world: World, cases: list[Any]) -> list[Tensor]:
    return [one_case(world, *case) for case in cases]


GROUPS = [(2, CASES), (4, [*CASES, ("adamw", "fsdp", 0.05, 1, 2)])]
if os.environ.get("MESH") == "all":
    GROUPS.append((8, [(*case, tp) for case in CASES for tp in (1, 2)]))


@pytest.mark.parametrize(("size", "cases"), GROUPS)
def test_weights_equal_those_of_one_process(size: int, cases: list[Any]) -> None:
    expected = [by_hand(gpt(), kind, sizes=SIZES, clip=clip, accumulate=k) for kind, _, clip, k, *_ in cases]
    for rank, found in enumerate(run_ranks(train_cases, size, cases, timeout_s=120)):
        for case, weights, wanted in zip(cases, found, expected, strict=True):
            assert (weights - wanted).abs().max() < CLOSE, (size, case, rank)
