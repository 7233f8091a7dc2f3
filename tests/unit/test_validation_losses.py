"""Validation losses are recognized by their names, and are drawn with the loss that they validate."""

from __future__ import annotations

import numpy as np
import pytest

from accel_nb.telemetry.events import MetricLogged, StepDone
from accel_nb.telemetry.validation_names import find_training_loss
from accel_nb.ui.series_table import Table
from accel_nb.ui.view import PanelState


@pytest.mark.parametrize(
    ("metric", "loss_names", "loss"),
    [
        ("val_loss", ["loss"], "loss"),
        ("val/loss", [""], ""),
        ("eval_loss", ["output.loss"], "output.loss"),
        ("Loss/validation", ["loss"], "loss"),
        ("valLoss", ["train_loss"], "train_loss"),
        ("test loss", ["loss"], "loss"),
        ("val_loss_g", ["loss_d", "loss_g"], "loss_g"),
        ("val_loss", ["loss_d", "loss_g"], "loss_d"),
        ("val_accuracy", ["loss"], None),
        ("loss", ["loss"], None),
        ("evaluated_loss", ["loss"], None),
        ("val_loss", [], None),
        ("val", ["loss"], None),
    ],
)
def test_a_metric_validates_the_loss_of_its_name(metric: str, loss_names: list[str], loss: str | None) -> None:
    assert find_training_loss(metric, loss_names) == loss


def test_facts_and_state_name_the_loss_that_a_metric_validates() -> None:
    state = PanelState("run", 1)
    state.apply([StepDone(0, step, float(step), 1 / step, 0.1, 0.01, 8) for step in range(1, 5)])
    state.apply([MetricLogged(0, step, 1.0, name, 0.5) for step in (2, 4) for name in ("val_loss", "accuracy")])
    assert [(fact["name"], fact["validates"]) for fact in state.facts()["metrics"]] == [
        ("val_loss", ""),
        ("accuracy", None),
    ]
    assert {name: list(table.columns[0]) for name, table in state.validation_losses("").items()} == {"val_loss": [2, 4]}


def test_a_band_has_the_extremes_and_the_mean_of_each_block() -> None:
    table = Table(2)
    for x, y in enumerate([3.0, 1.0, 2.0, 4.0, 9.0, float("nan"), 7.0, float("inf"), float("nan")]):
        table.append((float(x), y))
    xs, low, high, mean = table.bands(3)
    np.testing.assert_array_equal(xs, [1.5, 5.5, 8.0])
    np.testing.assert_array_equal(low, [1.0, 7.0, np.nan])
    np.testing.assert_array_equal(high, [4.0, 9.0, np.nan])
    np.testing.assert_array_equal(mean, [2.5, 8.0, np.nan])
    assert table.bands(100).shape == (4, 9)
