"""How long a forward takes by a model of reading and computing, and which parts stay so that it takes least."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import nn

from accel_nb.bigmodel.meta import init_empty_weights
from accel_nb.bigmodel.planning.cost_model import Pace, forward_time
from accel_nb.bigmodel.planning.device_map import (
    check_device_map,
    estimate_forward,
    infer_auto_device_map,
    plan_device_map,
)
from accel_nb.bigmodel.planning.placement import find_place
from accel_nb.bigmodel.planning.placement_search import Arrangement, ForwardStep, PlacedParts
from accel_nb.bigmodel.planning.sizes import Device, compute_module_sizes
from accel_nb.errors import ConfigError
from tests.support.transformer import Transformer

INFINITE = float("inf")


def pace(cpu: float = 10, disk: float = 10, *, beside: bool = True) -> Pace:
    return Pace(1, INFINITE, cpu, disk, reads_beside=beside)


def arranged(steps: Sequence[ForwardStep], room: dict[Device, float], own: Pace) -> Arrangement:
    parts = [PlacedParts((str(at),), (at,), step.nbytes) for at, step in enumerate(steps)]
    return Arrangement(parts, steps, room, own)


@pytest.mark.parametrize(
    ("computing", "reading", "expected"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0], 4),
        ([1, 1, 1, 1], [2, 2, 2, 2], 8),  # waiting for the link alone
        ([3, 3, 3, 3], [2, 2, 2, 2], 12),  # waiting for the device alone
        ([1, 1, 1, 1], [0, 2, 0, 2], 4),  # each arrives while its neighbors compute
        ([1, 1, 1, 1, 1, 1], [0, 0, 0, 3, 3, 0], 6),  # two buffers bridge that
        ([1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 3, 3, 3], 11),  # and no more than two
    ],
)
def test_a_forward_takes_what_a_pipeline_with_two_buffers_does(computing, reading, expected: float) -> None:
    sizes = [1] * len(computing)
    assert forward_time(computing, reading, sizes, 2).seconds == expected
    assert forward_time(computing, reading, sizes, 2, overlaps=False).seconds == sum(computing) + sum(reading)


def test_one_buffer_lets_nothing_arrive_beside_what_came_before() -> None:
    assert forward_time([1, 1], [1, 1], [1, 1], 1).seconds == 4
    assert forward_time([1, 1], [1, 1], [1, 1], 2).seconds == 2


def test_room_goes_to_what_takes_longest_to_come() -> None:
    steps = [
        ForwardStep(10, 0.1),
        ForwardStep(10, 0.1),
        ForwardStep(10, 0.1),
        ForwardStep(40, 0.1),
        ForwardStep(20, 0.1),
    ]
    own = arranged(steps, {0: 85, "disk": INFINITE}, pace())
    found = min(own.initial_placements(), key=lambda places: own.time(places).seconds)
    assert own.improve(found) == found == ["disk", "disk", "disk", 0, 0]


def test_what_is_away_lies_between_what_computes_long() -> None:
    steps = [
        ForwardStep(10, 3.0),
        ForwardStep(10, 0.1),
        ForwardStep(10, 3.0),
        ForwardStep(10, 0.1),
        ForwardStep(10, 0.1),
    ]
    own = arranged(steps, {0: 40, "cpu": INFINITE}, pace(cpu=5))
    found = own.improve([0, 0, "cpu", "cpu", "cpu"])
    assert found.count(0) == 2
    assert own.time(found).seconds == pytest.approx(6.3), "nothing is waited for"


def test_memory_is_for_what_would_else_come_slowly_from_disk() -> None:
    steps = [ForwardStep(20, 0.0), ForwardStep(30, 0.0), ForwardStep(25, 0.0)]
    own = arranged(steps, {0: 60, "cpu": 30, "disk": INFINITE}, pace(cpu=100, disk=1))
    assert own.improve(["cpu", "disk", "disk"]) == ["disk", "cpu", "disk"], "none can stay beside two buffers"


def test_the_largest_part_stays_if_its_buffers_would_cost_more() -> None:
    steps = [ForwardStep(10, 0.0), ForwardStep(10, 0.0), ForwardStep(50, 0.0), ForwardStep(10, 0.0)]
    own = arranged(steps, {0: 70, "disk": INFINITE}, pace())
    assert own.improve(["disk"] * 4)[2] == 0


def test_found_arrangements_are_as_fast_as_the_best_of_all() -> None:
    num_compared = 0
    for seed in range(60):
        draw = random.Random(seed)
        sizes = [10 * draw.randint(1, 20) for _ in range(draw.randint(3, 6))]
        steps = [
            ForwardStep(size, draw.choice([size / draw.choice([10, 30, 60]), 10 * draw.random()])) for size in sizes
        ]
        parts = [PlacedParts((str(at),), (at,), size) for at, size in enumerate(sizes)]
        if draw.random() < 0.3:  # tied weights: used at the beginning and at the end
            steps[-1] = ForwardStep(steps[0].nbytes, steps[-1].seconds)
            parts = [PlacedParts(("0",), (0, len(steps) - 1), sizes[0]), *parts[1:-1]]
        total = sum(part.nbytes for part in parts)
        room: dict[Device, float] = {0: total * draw.uniform(0.5, 1.2), "cpu": total / 3, "disk": INFINITE}
        own = Arrangement(parts, steps, room, pace(draw.choice([20, 50]), draw.choice([10, 20]), beside=seed % 4 > 0))
        everywhere = [list(places) for places in product(room, repeat=len(parts))]
        fitting = [places for places in everywhere if own.fits(places)]
        if ["disk"] * len(parts) not in fitting:
            continue
        num_compared += 1
        found = own.improve(["disk"] * len(parts))
        assert own.fits(found)
        assert own.time(found).seconds == pytest.approx(min(own.time(places).seconds for places in fitting)), seed
    assert num_compared > 30


class Uneven(nn.Module):
    """Blocks of several sizes, one after another."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16)) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what came through all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_of_unequal_size_are_planned_by_time() -> None:
    with init_empty_weights():
        model = Uneven([32, 32, 32, 256, 32, 256])
    sizes = compute_module_sizes(model)
    limits: dict[Device, int] = {0: sizes["blocks.3"] * 2 + sizes["blocks.0"] * 2 + 1000, "cpu": 10**9}
    known = infer_auto_device_map(model, limits)
    planned = plan_device_map(model, "auto", limits)
    check_device_map(model, planned)
    assert {find_place(f"blocks.{at}", planned) for at in (3, 5)} == {0}, "the large ones stay"
    own = Pace.typical(0)
    assert estimate_forward(model, planned, own).seconds < 0.5 * estimate_forward(model, known, own).seconds
    assert plan_device_map(model, "sequential", limits) == known


def test_what_blocks_compute_is_weighed() -> None:
    with init_empty_weights():
        model = Uneven([64] * 6)
    block = compute_module_sizes(model)["blocks.0"]
    # Two stay: those that compute at length hide the arrival of two of the others each.
    flops = {f"blocks.{at}": 4_000_000 if at in (1, 4) else 0 for at in range(6)}
    own = Pace(1e6, INFINITE, block / 2, block / 2)
    limits: dict[Device, int] = {0: 4 * block + 1000, "cpu": 10**9}
    planned = infer_auto_device_map(model, limits, pace=own, flops=flops)
    unweighed = infer_auto_device_map(model, limits, pace=own)
    times = [estimate_forward(model, places, own, flops=flops).seconds for places in (planned, unweighed)]
    assert times[0] <= times[1]
    assert times[0] == pytest.approx(8, rel=0.1)


def test_a_look_up_computes_nothing_and_tied_weights_are_one_part() -> None:
    model = Transformer(vocabulary=4096, depth=6)
    sizes = compute_module_sizes(model)
    limits: dict[Device, int] = {0: sizes["embedding"] + 4 * sizes["blocks.0"], "cpu": 10**9}
    planned = plan_device_map(model, "auto", limits)
    check_device_map(model, planned)
    assert find_place("embedding.weight", planned) == find_place("head.weight", planned) == 0


def test_planning_many_parts_ends_soon_and_within_limits() -> None:
    draw = random.Random(1)
    steps = [ForwardStep(draw.randint(1, 100), draw.random()) for _ in range(150)]
    own = arranged(steps, {0: sum(step.nbytes for step in steps) / 2, "disk": INFINITE}, pace(cpu=100, disk=100))
    start: list[Device] = ["disk"] * 150
    found = own.improve(start)
    assert own.fits(found)
    assert own.time(found).seconds < min(own.time(start).seconds, 1.1 * sum(step.seconds for step in steps))


def test_a_plan_says_what_a_forward_takes(capsys: pytest.CaptureFixture[str]) -> None:
    model = Uneven([64] * 6)
    infer_auto_device_map(model, {"cpu": 60_000}, pace=Pace(1e9, 1e9, 1e9, 1e6), verbose=True)
    assert "a forward is expected to take" in capsys.readouterr().out


def test_a_pace_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Pace(0, 1, -1, float("nan"))
    assert len(caught.value.problems) == 3
    assert "flops_per_s is 0; give a rate per second" in str(caught.value)
