"""The map of an allocator's blocks: folded from snapshots of the format that torch gives, shown as it came."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
import torch
from torch import nn

from accel_nb.accelerator.memory import memory_snapshot
from accel_nb.accelerator.training.run_control import NO_MEMORY_SNAPSHOT, ControlReceiver
from accel_nb.runtime.devices.registry import device_type
from accel_nb.telemetry.actions import TakeMemorySnapshot
from accel_nb.telemetry.allocator_blocks import (
    AWAITING_FREE,
    FREE,
    IN_USE,
    MAX_BLOCKS,
    MAX_SEGMENTS,
    MIXED,
    condense_snapshot,
)
from accel_nb.telemetry.events import MemorySnapshot, StepDone, from_message, to_message
from accel_nb.telemetry.memory import storage_bytes
from accel_nb.ui.panel import Panel
from accel_nb.ui.view import PanelState

MIB = 2**20
USED, PENDING, INACTIVE = "active_allocated", "active_pending_free", "inactive"


def segment(*blocks: tuple[int, str], device: int = 0, address: int = 0x7F0000000000) -> dict[str, Any]:
    """Return a segment as ``torch.cuda.memory_snapshot()`` of torch 2.13 describes it."""
    listed: list[dict[str, Any]] = []
    total = 0
    for size, state in blocks:
        listed.append(
            {"address": address + total, "size": size, "requested_size": size - 8, "state": state, "frames": []}
        )
        total += size
    used = sum(size for size, state in blocks if state == USED)
    active = sum(size for size, state in blocks if state != INACTIVE)
    return {
        "device": device,
        "address": address,
        "total_size": total,
        "allocated_size": used,
        "active_size": active,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large" if total > MIB else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": listed,
    }


def test_neighbors_of_one_state_are_one_block_and_segments_come_by_size():
    small = segment((MIB, USED), (MIB, INACTIVE))
    large = segment((4 * MIB, USED), (2 * MIB, USED), (MIB, PENDING), (9 * MIB, INACTIVE))
    other = segment((64 * MIB, USED), device=1)
    found = condense_snapshot([small, other, large], 0)
    assert found.segments == (16 * MIB, 2 * MIB)
    assert found.blocks == (
        (0, 0, 6 * MIB, IN_USE),
        (0, 6 * MIB, MIB, AWAITING_FREE),
        (0, 7 * MIB, 9 * MIB, FREE),
        (1, 0, MIB, IN_USE),
        (1, MIB, MIB, FREE),
    )
    assert (found.num_segments, found.reserved, found.in_use) == (2, 18 * MIB, 7 * MIB)
    assert found.largest_free == 9 * MIB


def test_the_name_in_torchs_documentation_is_understood_too():
    assert condense_snapshot([segment((8, "active_awaiting_free"))], 0).blocks == ((0, 0, 8, AWAITING_FREE),)


def test_nothing_is_a_map_too():
    assert condense_snapshot([], 0).blocks == ()
    assert condense_snapshot([segment((8, USED), device=1)], 0).reserved == 0


def test_a_map_is_bounded_and_its_large_blocks_stay_where_they_are():
    chance = random.Random(0)
    crumbs = [(chance.randrange(512, 8192), chance.choice((USED, INACTIVE))) for _ in range(20_000)]
    crumbled = segment(*crumbs[:10_000], (500 * MIB, USED), *crumbs[10_000:], (300 * MIB, INACTIVE))
    many = [segment((2 * MIB, USED if index % 2 else INACTIVE)) for index in range(300)]
    found = condense_snapshot([crumbled, *many], 0)
    assert len(found.segments) == MAX_SEGMENTS
    assert len(found.blocks) <= MAX_BLOCKS
    assert found.num_segments == 301
    assert found.reserved == sum(item["total_size"] for item in (crumbled, *many))
    assert found.in_use == sum(item["allocated_size"] for item in (crumbled, *many))
    assert found.largest_free >= 300 * MIB
    ends = dict.fromkeys(range(MAX_SEGMENTS), 0)
    for place, offset, size, _ in found.blocks:
        assert offset == ends[place], "blocks lie one behind the other"
        ends[place] += size
    assert tuple(ends.values()) == found.segments
    before = sum(size for size, _ in crumbs[:10_000])
    (large,) = [block for block in found.blocks if block[2] >= 500 * MIB]
    assert before - 20 * 8192 <= large[1] <= before
    assert large[3] == IN_USE
    assert any(state == MIXED for *_, state in found.blocks)


@pytest.mark.parametrize("seed", range(20))
def test_any_snapshot_fits(seed: int):
    chance = random.Random(seed)
    segments = [
        segment(*((2 ** chance.randrange(9, 28), chance.choice((USED, PENDING, INACTIVE))) for _ in range(number)))
        for number in (chance.randrange(1, 400) for _ in range(chance.randrange(1, 80)))
    ]
    found = condense_snapshot(segments, 0)
    assert len(found.blocks) <= MAX_BLOCKS
    assert sum(size for _, _, size, _ in found.blocks) == sum(found.segments)


def snapshot_event(rank: int = 0, **changes: Any) -> MemorySnapshot:
    found = condense_snapshot([segment((4 * MIB, USED), (12 * MIB, INACTIVE))], 0)
    fields: dict[str, Any] = {
        "rank": rank,
        "step": 7,
        "time": 1.0,
        "num_segments": 1,
        "reserved": found.reserved,
        "in_use": found.in_use,
        "largest_free": found.largest_free,
        "segments": found.segments,
        "blocks": tuple(number for block in found.blocks for number in block),
        "holders": ("`losses (line 3)`", "<b>"),
        "holder_bytes": (3 * MIB, MIB),
    }
    return MemorySnapshot(**{**fields, **changes})


def test_a_rank_maps_its_device_with_those_who_hold_it():
    """The snapshot stands for a GPU's; who holds what is counted on this machine's memory."""
    snapshot = [segment((4 * MIB, USED))]
    names = {"model": nn.Linear(256, 256), "kept": torch.zeros(1000, 1000), "_hidden": torch.zeros(10)}
    source = "model = make()\n\nkept = torch.zeros(1000, 1000)"
    event = memory_snapshot.make_memory_snapshot(snapshot, [], names, rank=0, step=3, device="cpu", source=source)
    assert event.blocks == (0, 0, 4 * MIB, IN_USE)
    assert event.holders == ("kept (line 3)", "weights, gradients and optimizer state of Linear")
    assert event.holder_bytes == (4_000_000, 4 * (256 * 256 + 256))
    assert from_message(to_message(event)) == event


def test_a_processor_has_no_map():
    assert device_type("cpu").allocator_snapshot() is None
    receiver = ControlReceiver(lambda request, step, text: None, str)
    assert receiver._do(TakeMemorySnapshot(), types.SimpleNamespace(num_steps=3)) == NO_MEMORY_SNAPSHOT  # type: ignore[arg-type]


def test_a_panel_sends_a_map_once_and_again_with_a_snapshot(monkeypatch: pytest.MonkeyPatch):
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda *args, **kwargs: types.SimpleNamespace(update=print))
    monkeypatch.setattr("accel_nb.ui.widget.PanelWidget.send", lambda _, message, buffers: sent.append(message))
    panel = Panel("run", 2, display="widget")
    panel.feed([StepDone(0, 1, 1.0, 0.5, 0.1, 0.01, 8)])
    panel.refresh(force=True)
    panel.feed([snapshot_event(), snapshot_event(1)])
    panel_display: Any = panel._displays[0]
    panel_display._next_at = 0.0
    panel.refresh()
    panel.refresh(force=True)
    panel_display._on_message(None, {"kind": "resync"}, [])
    panel.refresh(force=True)
    assert ["memory_snapshots" in message for message in sent] == [False, True, False, True]
    assert [found["rank"] for found in sent[1]["memory_snapshots"]] == [0, 1]
    assert sent[1]["memory_snapshots"][0]["blocks"] == snapshot_event().blocks


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": (0, 0, 1)},
        {"blocks": (0, 0, 1, 0) * (MAX_BLOCKS + 1)},
        {"blocks": (0, 0, -1, 0)},
        {"segments": (1,) * (MAX_SEGMENTS + 1)},
        {"holder_bytes": (1,)},
        {"holders": ("x",) * 17, "holder_bytes": (1,) * 17},
        {"reserved": 2**60},
    ],
)
def test_a_forged_map_is_dropped(changes: dict[str, Any]):
    state = PanelState("run", 2)
    state.apply([snapshot_event(**changes)])
    assert not state.snapshots
    assert state.num_dropped == 1


class Scaled(torch.Tensor):
    """A tensor of two others, as the optimizers of torchao have for their state."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Elsewhere(Scaled):
    """A tensor without memory here."""

    __tensor_flatten__ = None  # type: ignore[assignment]


def test_memory_of_tensors_that_consist_of_others_is_theirs():
    parts = torch.zeros(10, dtype=torch.uint8), torch.zeros(2)
    assert storage_bytes([Scaled(*parts)]) == 18
    assert storage_bytes([Elsewhere(*parts)]) == 40
