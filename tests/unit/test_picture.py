import struct
import sys

import pytest

from accel_nb.telemetry.events import MetricLogged, RankFailed, StepDone
from accel_nb.ui.picture import draw_png
from accel_nb.ui.view import PanelState
from tests.ui.synthetic import training_events


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_picture_of_a_run_is_crisp_and_small():
    state = PanelState("digits", 2)
    state.apply(training_events(600))
    state.finish("done")
    png = draw_png(state)
    assert size_of(png)[0] > 1200
    assert 8_000 < len(png) < 80_000


def test_picture_has_the_curve_of_a_named_loss():
    def draw(curve: str) -> bytes:
        state = PanelState("digits", 1)
        state.apply([StepDone(0, step, float(step), 1 / step, 0.1, 0.01, 8, curve=curve) for step in range(1, 50)])
        state.finish("done")
        return draw_png(state)

    assert draw("loss") == draw("")


def test_picture_has_the_validation_loss_in_the_chart_of_the_loss():
    def draw(metric: str) -> bytes:
        state = PanelState("digits", 1)
        state.apply([StepDone(0, step, float(step), 1 / step, 0.1, 0.01, 8) for step in range(1, 50)])
        state.apply([MetricLogged(0, step, float(step), metric, 1 / step) for step in (10, 20, 30)])
        state.finish("done")
        return draw_png(state)

    assert draw("accuracy") != draw("val_loss") != draw("eval/loss")


def test_picture_of_a_long_run_is_a_band_and_two_losses_have_a_mark():
    def draw(spike: float) -> bytes:
        state = PanelState("digits", 1)
        losses = [1.0] * 3000
        losses[1500] = spike
        state.apply([StepDone(0, step, float(step), loss, 0.1, 0.01, 8) for step, loss in enumerate(losses)])
        state.apply([StepDone(0, 3000, 3000.0, 1.0, 0.1, 0.01, 8, curve="generator")])
        assert [mark.kind for mark in state.marks] == ["begins"]
        state.finish("done")
        return draw_png(state)

    assert draw(5.0) != draw(6.0), "the band reaches the highest value"


def test_picture_leaves_pyplot_and_the_backend_alone():
    state = PanelState("run", 1)
    state.apply([StepDone(0, 1, 1.0, 0.5, 0.1, 0.01, 8)])
    was_there = "matplotlib.pyplot" in sys.modules
    draw_png(state)
    assert ("matplotlib.pyplot" in sys.modules) == was_there


@pytest.mark.parametrize(
    "events",
    [
        [],
        [StepDone(0, 1, 1.0, float("nan"), 0.1, 0.01, 8)],
        [StepDone(0, n, 1.0, float("inf"), 0.1, 0.01, 8) for n in range(5)],
        [StepDone(0, n, 1.0, 1e300 * (-1) ** n, 0.1, 0.01, 8) for n in range(5)],
        [StepDone(0, n, 1.0, float("nan") if n > 500 else 1e300 * (-1) ** n, 0.1, 0.01, 8) for n in range(2000)],
        [MetricLogged(0, 1, 1.0, r"$\alpha_{$ <b> 100%", 0.5)],
        [RankFailed(0, 1.0, "$broken_{math")],
        list(training_events(50, num_ranks=12)),
        list(training_events(1, num_ranks=1)),
    ],
    ids=["nothing", "nan", "inf", "huge", "long-nan", "odd-name", "failed", "many-ranks", "one-moment"],
)
def test_picture_of_odd_states(events):
    state = PanelState(r"odd $\name_{", 12)
    state.apply(events)
    state.finish("failed")
    size_of(draw_png(state))
