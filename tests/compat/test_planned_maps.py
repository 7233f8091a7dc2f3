"""Device maps that the alias plans: devices in order, memory kept for the largest part, tied tensors together."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from accel_nb import compat
from accel_nb.errors import ConfigError


class Block(nn.Module):
    """Parts of 48, 56 and 80 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.BatchNorm1d(3), nn.Linear(4, 4)


@pytest.fixture(name="plan")
def planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The function under the alias; an earlier test of this process may have imported the real package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    compat.install()
    from accelerate import infer_auto_device_map

    yield infer_auto_device_map
    compat.uninstall()


def test_memory_for_the_largest_further_part_is_kept_on_the_first_accelerator_only(plan: Any) -> None:
    assert plan(Block(), {0: 183, 1: 136}) == {"first": 0, "norm": 1, "last": 1}
    assert plan(Block(), {0: 184, 1: 136}) == {"": 0}, "nothing remains that needs memory"


def test_a_module_is_split_unless_its_class_is_kept_whole(plan: Any) -> None:
    model = nn.Sequential(Block(), Block())
    limits = {0: 320, 1: 1000}
    assert plan(model, limits) == {"0": 0, "1.first": 0, "1.norm": 1, "1.last": 1}
    assert plan(model, limits, no_split_module_classes={"Block"}) == {"": 1}
    assert plan(model, {0: 368, 1: 1000}, "Block") == {"": 0}


def test_parts_with_a_tied_tensor_are_placed_together(plan: Any) -> None:
    model = nn.ModuleDict({"one": Block(), "two": Block(), "three": Block()})
    parts: Any = model
    parts["three"].last.weight = parts["one"].last.weight
    places = plan(model, {0: 280, 1: 1000})
    assert places == {"one": 0, "three.last": 0, "two": 1, "three.first": 1, "three.norm": 1}


def test_a_device_that_receives_nothing_is_logged_and_a_later_part_may_be_placed_there(
    plan: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(2, 2), nn.Linear(4, 4))
    assert plan(model, {0: 110}) == {"": "disk"}
    assert "insufficient memory" in caplog.text
    caplog.clear()
    assert plan(model, {0: 110}, fallback_allocation=True) == {"0": "disk", "1": 0, "2": "disk"}
    assert not caplog.text


def test_buffers_of_offloaded_parts_need_memory_unless_they_are_offloaded(plan: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    limits = {0: 200, "cpu": 1000}
    with pytest.warns(UserWarning, match="offload_buffers=True"):
        assert plan(model, limits) == {"0": 0, "1": "cpu", "2": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(model, limits, offload_buffers=True) == {"0": 0, "1": "cpu", "2": "cpu"}
        plan(model, {**limits, 0: 300})


def test_entries_are_kept_apart_sizes_are_of_a_dtype_and_the_plan_is_printed(
    plan: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    places = plan(model, {0: 80}, dtype=torch.float16, verbose=True, clean_result=False)
    assert places == {"0": 0, "1": 0}
    assert "0: 0, 40 B" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="disk"):
        plan(model, {0: 0, "disk": 10})
