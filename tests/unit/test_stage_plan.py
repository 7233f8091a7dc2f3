"""Which models can be computed in stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_nb.strategies.base import Refusal
from accel_nb.strategies.pipeline.stage_plan import plan_stages


def refused(model: nn.Module, **options: Any) -> str:
    found = plan_stages(model, 2, **options)
    assert isinstance(found, Refusal)
    return str(found)


def test_a_module_at_two_places_is_refused() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 4))
    assert refused(model).startswith("Sequential has one ReLU at several places of itself, and a stage would not know")
    assert not isinstance(
        plan_stages(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in "ab")), 2), Refusal
    )


def test_hooks_inside_of_a_model_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_forward_hook(lambda *_: None)
    assert not isinstance(plan_stages(model, 2), Refusal)
    model[1].register_forward_hook(lambda *_: None)
    assert refused(model) == (
        "hooks inside of a Sequential would be called on one worker only, for each micro-batch: remove them before the "
        "model is trained, or train with --pp 1"
    )


def test_batch_normalization_needs_one_stage_for_each_worker() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.BatchNorm1d(4))
    assert not isinstance(plan_stages(model, 2, is_in_micro_batches=False), Refusal)
    assert "has batch normalization" in refused(model, is_in_micro_batches=False, stages_per_rank=2)


def test_blocks_are_of_the_list_with_most_parameters() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"few": nn.ModuleList([nn.Linear(1, 1)] * 2), "many": nn.ModuleList(nn.Linear(4, 4) for _ in "ab")}
    )
    found = plan_stages(model, 2)
    assert not isinstance(found, Refusal)
    assert found.blocks == ("many.0", "many.1")
