"""Dividing models with PyTorch versions whose `fully_shard` has other names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from accel_nb.config.sections import FsdpOptions
from accel_nb.precision.half import build_precision
from accel_nb.strategies.base import Bundle
from accel_nb.strategies.fsdp.parameter_groups import groups_of
from accel_nb.strategies.fsdp.strategy import Fsdp


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        ({"_fsdp_param_groups": ["a", "b"], "_fsdp_param_group": "a"}, ["a", "b"]),
        ({"_fsdp_param_groups": []}, []),
        ({"_fsdp_param_group": "a"}, ["a"]),
        ({"_fsdp_param_group": None}, []),
    ],
)
def test_the_groups_of_a_unit_are_found_under_either_name(state: dict[str, object], groups: list[str]):
    assert groups_of(SimpleNamespace(**state)) == groups


def test_an_option_that_this_pytorch_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    options = FsdpOptions(average_unused=True)
    refused = Fsdp(options, build_precision("no", torch.device("cpu"))).refusal(Bundle())
    assert refused is not None
    assert "fsdp.average_unused needs a newer PyTorch" in str(refused)
