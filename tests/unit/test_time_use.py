"""Where a rank's time goes: what the thread's clocks and the loader show, and what the panel makes of it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accel_nb import Accelerator
from accel_nb.telemetry import time_use
from accel_nb.telemetry.events import DeviceLoad, Event, StepDone, TimeUsed, WorkerPrepared, current_sink
from accel_nb.telemetry.ring import RingReader, RingWriter, create_ring
from accel_nb.telemetry.time_use import TimeMeter
from accel_nb.ui.view import PanelState

SENSORS = {"GPU utilization (%)": 90.0, "GPU power (W)": 300.0}


class Sink:
    def __init__(self) -> None:
        self.events: list[TimeUsed] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, TimeUsed):
            self.events.append(event)


def block(seconds: float) -> None:
    threading.Event().wait(seconds)


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def measured(device: str = "cpu") -> TimeUsed:
    """Read for 0.2 s, of which the thread computes a half, compute for 0.3 s, and wait for 0.4 s."""
    sink = Sink()
    meter = TimeMeter(1, device, sink)
    meter.sample(time.perf_counter(), 1)
    started, cpu_started = time.perf_counter(), time.thread_time()
    compute(0.1)
    block(0.1)
    meter.add_read(started, cpu_started)
    compute(0.3)
    block(0.4)
    meter.sample(time.perf_counter(), 2)
    (event,) = sink.events
    return event


def test_reading_computing_and_waiting_are_told_apart():
    event = measured()
    assert (event.rank, event.step) == (1, 2)
    assert event.computing_s == pytest.approx(0.3, abs=0.05), "processor time, which other programs do not change"
    assert event.reading_s >= 0.19
    assert event.blocked_s + event.queued_s >= 0.39, "waiting, of which a busy machine counts a part as queued"


def test_no_time_is_below_zero_where_another_thread_measures_next():
    sink = Sink()
    meter = TimeMeter(0, "cpu", sink)
    seconds = iter([(5.0, 3.0), (5.5, 0.5)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_use, "_thread_seconds", lambda: next(seconds))
        meter.sample(0.0, 1)
        meter.sample(1.0, 2)
    (event,) = sink.events
    assert (event.computing_s, event.queued_s, event.blocked_s) == (0.5, 0.0, 0.5)


def test_where_a_device_computes_only_reading_is_measured():
    event = measured("meta")
    assert (event.blocked_s, event.queued_s) == (0.0, 0.0)
    assert event.computing_s > 0.6


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        block(0.03)
        return torch.ones(2)


def test_a_slow_loader_is_seen_in_a_training_loop():
    sink = Sink()
    token = current_sink.set(sink)
    try:
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Slow(), batch_size=1))
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        current_sink.reset(token)
    assert sum(event.reading_s for event in sink.events) > 0.1, "of 0.36 s in all"


def test_the_ring_carries_records():
    descriptor = create_ring(8)
    writer, reader = RingWriter(descriptor), RingReader(descriptor)
    event = TimeUsed(3, 7, 1.5, 0.25, 0.5, 0.125, 0.0625)
    assert RingWriter.can_write(event)
    writer.write(event)
    assert reader.read() == [event]
    writer.close()
    reader.close()


def panel(*ranks: tuple[float, float, float, float]) -> PanelState:
    state = PanelState("digits", len(ranks))
    for step in range(1, 6):
        for rank, durations in enumerate(ranks):
            state.apply([StepDone(rank, step, float(step), 1.0, 0.1, 0.2, 4), TimeUsed(rank, step, step, *durations)])
    return state


def test_the_straggler_is_the_rank_that_others_wait_for():
    state = panel((0.05, 0.2, 0.35, 0.0), (0.05, 0.5, 0.05, 0.0), (0.05, 0.2, 0.35, 0.0))
    assert [rank["is_straggler"] for rank in state.facts()["ranks"]] == [False, True, False], (
        "their steps take equally long"
    )
    shares = state.facts()["ranks"][0]["time_use"]
    assert shares is not None
    assert shares == {
        "reading": pytest.approx(1 / 12),
        "computing": pytest.approx(1 / 3),
        "blocked": pytest.approx(7 / 12),
        "queued": 0.0,
    }
    assert panel((0.05, 0.3, 0.25, 0.0), (0.05, 0.4, 0.15, 0.0)).straggler() is None


def test_much_reading_and_too_few_processors_are_noted():
    assert panel((0.3, 0.2, 0.1, 0.0), (0.1, 0.2, 0.3, 0.0)).notes() == [
        "the other ranks wait for rank 0, at least 50% of their time",
        "rank 0 reads data 50% of its time: num_workers of a DataLoader read ahead",
    ]
    assert panel((0.0, 0.3, 0.0, 0.3)).notes() == ["rank 0 has no free processor 50% of its time: use fewer workers"]


def test_records_that_cannot_be_are_dropped():
    state = panel((0.1, 0.2, 0.3, 0.0))
    state.apply([TimeUsed(0, 6, 6.0, float("nan"), 0.0, 0.0, 0.0), TimeUsed(0, 6, 6.0, -1.0, 0.0, 0.0, 0.0)])
    assert state.num_dropped == 2
    state.finish("done")
    assert state.facts()["ranks"][0]["time_use"] is not None


def test_the_share_of_computing_is_a_curve_for_each_rank_and_the_slowest_is_named():
    state = PanelState("run", 2)
    state.apply(WorkerPrepared(rank, 0.0, "cpu", "ddp", "no", (), ()) for rank in (0, 1))
    for step in range(1, 9):
        for rank, durations in enumerate([(0.1, 0.1, 0.2, 0.0), (0.0, 0.3, 0.0, 0.1)]):
            state.apply([StepDone(rank, step, float(step), 1.0, 0.1, 0.4, 4), TimeUsed(rank, step, step, *durations)])
    (name,) = state.facts()["utilization"]
    shares = [list(state.tables["metric", rank, name].columns[1]) for rank in (0, 1)]
    assert shares == [pytest.approx([25.0] * 8), pytest.approx([75.0] * 8)]
    assert state.facts()["metrics"] == [], "not a metric of the user's"
    assert "the other ranks wait for rank 1, at least 50% of their time" in state.facts()["notes"]


def test_a_device_that_works_by_itself_has_no_share_of_computing():
    state = PanelState("run", 1)
    state.apply([WorkerPrepared(0, 0.0, "cuda:0", "single", "no", (), ()), TimeUsed(0, 1, 1.0, 0.1, 0.9, 0.0, 0.0)])
    assert state.facts()["utilization"] == []


def test_sensors_of_a_device_are_curves_of_utilization():
    state = PanelState("run", 1)
    state.apply([WorkerPrepared(0, 0.0, "cuda:0", "single", "no", (), ())])
    state.apply(DeviceLoad(0, step, float(step), name, value) for step in (1, 2) for name, value in SENSORS.items())
    assert state.facts()["utilization"] == list(SENSORS)
    assert list(state.tables["metric", 0, "GPU power (W)"].columns[1]) == [300.0, 300.0]
    assert state.facts()["metrics"] == [], "not a metric of the user's"
