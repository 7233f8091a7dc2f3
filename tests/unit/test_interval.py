"""The interval between saves: the formula is the minimum of what a run loses, and its limits are sound."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from accel_nb.accelerator.state.save_report import CompletedSave, describe_saves, describe_unsaved
from accel_nb.checkpoint.interval import SaveCost, best_interval


def expected_time(work_s: float, interval_s: float, save_s: float, failure_s: float) -> float:
    """Return how long work takes with failures that come at random: Daly's model, without time to restart."""
    return failure_s * (math.exp((interval_s + save_s) / failure_s) - 1) * work_s / interval_s


@pytest.mark.parametrize("save_s", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("failure_s", [600.0, 3600.0, 43_200.0])
def test_no_other_interval_takes_less_time(save_s: float, failure_s: float) -> None:
    best = best_interval(save_s, failure_s)
    least = expected_time(1.0, best, save_s, failure_s)
    for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0):
        assert least <= expected_time(1.0, best * factor, save_s, failure_s) * (1 + 1e-4)


def test_young_is_the_first_term() -> None:
    assert best_interval(0.01, 36_000) == pytest.approx(math.sqrt(2 * 0.01 * 36_000), rel=0.01)


def test_a_save_that_takes_longer_than_runs_last_is_made_once_a_failure() -> None:
    assert best_interval(100.0, 10.0) == 10.0
    assert best_interval(0.0, 10.0) == 0.0


@pytest.mark.parametrize(("save_s", "failure_s"), [(-1, 1), (1, 0), (math.nan, 1), (1, math.inf)])
def test_what_is_no_time_is_refused(save_s: float, failure_s: float) -> None:
    with pytest.raises(ValueError, match="both must be finite"):
        best_interval(save_s, failure_s)


def test_saves_in_the_background_are_no_closer_than_they_take_to_write() -> None:
    assert SaveCost(10**9, 0.001, 300.0).interval_s(3600.0) == 300.0
    assert SaveCost(10**9, 1.0, 2.0).interval_s(3600.0) == best_interval(1.0, 3600.0)


def test_what_was_saved_is_one_short_line() -> None:
    saved = [
        CompletedSave(step, f"runs/step_{step}", SaveCost(48_200_000, 0.0312, 1.234)) for step in (5, 10, 15, 20, 25)
    ]
    assert describe_saves(saved, "runs", 0) == [
        "saved step 5, 10, ..., 25 (5) in runs · 46.0 MiB, at most 31.2 ms of the training's time, on disk after 1.23 s"
    ]
    assert describe_saves([], None, 0) == []
    assert describe_saves([], None, 3)[0].startswith("3 saves postponed")
    assert "step 25" in describe_unsaved(saved)


def test_it_needs_no_torch() -> None:
    code = "import sys, accel_nb.checkpoint.interval; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
