"""When a run saves by itself: by steps, by time, and when asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.training.autosave import Autosave
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.communicator import LocalComm
from accel_nb.runtime.world import World
from accel_nb.telemetry.events import CheckpointSaved, Event, from_message, to_message


class Run:
    """Steps of which each takes a known time."""

    def __init__(self, **options: Any) -> None:
        self.step = 0
        self.time = 0.0
        self.saved: list[tuple[int, float]] = []
        self.comm = Counting()
        self.autosave = Autosave(
            self.comm,
            lambda: self.saved.append((self.step, self.time)),
            lambda: self.step,
            clock=lambda: self.time,
            **options,
        )

    def go(self, num_steps: int, step_s: float, boundaries: int = 1) -> None:
        for _ in range(num_steps):
            self.step += 1
            self.time += step_s
            for _ in range(boundaries):
                self.autosave.on_batch_end()


class Counting(LocalComm):
    """Counts messages."""

    def __init__(self) -> None:
        super().__init__()
        self.num_messages = 0

    def all_gather_json(self, value: Any) -> list[Any]:
        self.num_messages += 1
        return super().all_gather_json(value)


def test_by_steps():
    run = Run(steps=5)
    run.go(17, 0.01, boundaries=3)  # several micro-batches to a step save once
    assert [step for step, _ in run.saved] == [5, 10, 15]
    run.autosave.resume_from(2)
    run.step = 2
    run.go(6, 0.01)
    assert [step for step, _ in run.saved] == [5, 10, 15, 7]


def test_by_time():
    run = Run(seconds=10)
    run.go(4000, 0.01)
    assert len(run.saved) == 3  # in 40 seconds, since a save is due 10 seconds after the last and a little late
    assert all(at >= 10 * number for number, (_, at) in enumerate(run.saved, 1))
    assert all(later - earlier < 11 for (_, earlier), (_, later) in zip(run.saved, run.saved[1:], strict=False))
    assert run.comm.num_messages < 200  # of 4000 steps


def test_by_time_with_slow_steps():
    run = Run(seconds=10)
    run.go(10, 4.0)
    assert [step for step, _ in run.saved] == [3, 6, 9]


def test_when_asked():
    run = Run(steps=1_000_000)
    run.go(1000, 0.01)
    run.autosave.request_save()
    run.go(200, 0.01)
    assert len(run.saved) == 1
    assert run.saved[0][0] <= 1000 + 60  # half a second later, with room for a step that was slow


def test_a_stop_saves_and_ends_the_run_at_a_boundary():
    run = Run()
    assert not run.autosave.request_stop(), "no loop has come to a boundary"
    run.autosave.begin_run()
    run.go(100, 0.01)
    assert run.autosave.request_stop()
    with pytest.raises(KeyboardInterrupt):
        run.go(200, 0.01)
    assert [step for step, _ in run.saved] == [run.step] == [run.autosave.stopped_step]
    run.autosave.begin_run()
    run.go(200, 0.01)
    assert len(run.saved) == 1


def test_a_step_that_is_saved_already_is_not_saved_again():
    run = Run(steps=1)
    run.go(1, 1.0)
    run.autosave.request_stop()
    run.autosave._saved_step = 2
    with pytest.raises(KeyboardInterrupt):
        run.go(1, 1.0)
    assert [step for step, _ in run.saved] == [1]


def test_code_that_handles_a_stop_is_not_stopped_again():
    stops: list[int] = []
    run = Run(steps=1, on_stop=lambda: stops.append(run.step))
    run.go(1, 1.0)
    run.autosave.request_stop()
    run.autosave._saved_step = 2
    with pytest.raises(KeyboardInterrupt):
        run.go(1, 1.0)
    run.go(200, 1.0)
    assert stops == [2]


def test_a_request_that_arrives_after_another_ranks_request_has_stopped_the_run_stops_it_no_more(monkeypatch):
    run = Run(steps=1)
    run.go(1, 1.0)
    monkeypatch.setattr(run.comm, "all_gather_json", lambda value: [value, [2, 1, False]])
    with pytest.raises(KeyboardInterrupt):
        run.go(1, 1.0)
    monkeypatch.undo()
    assert run.autosave.request_stop()
    run.go(200, 1.0)
    run.autosave.request_stop()
    with pytest.raises(KeyboardInterrupt):
        run.go(1, 1.0)


def test_a_stop_far_from_a_boundary_is_refused():
    run = Run()
    run.go(10, 4.0)
    run.time += 11.0
    assert run.autosave.request_stop(), "steps take four seconds"
    run.time += 2.0
    assert not run.autosave.request_stop()


def test_saves_are_put_off_while_the_one_before_is_slow():
    is_behind = [False]
    run = Run(steps=5, is_behind=lambda: is_behind[0])
    run.go(5, 0.01)
    is_behind[0] = True
    before = run.comm.num_messages
    run.go(600, 0.01)
    assert [step for step, _ in run.saved] == [5]
    assert run.autosave.num_postponed > 0
    assert run.comm.num_messages - before < 20, "asks about twice a second"
    is_behind[0] = False
    run.go(60, 0.01)
    assert run.saved[1][0] > 605


def make(folder: Path | None, **checkpoint: Any) -> Accelerator:
    config = {"checkpoint": {"dir": None if folder is None else str(folder), **checkpoint}}
    return Accelerator(world=World(), cpu=True, config=config, seed=1)


def train(accelerator: Accelerator, num_epochs: int) -> tuple[list[int], torch.Tensor]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(10.0).unsqueeze(1)), batch_size=2, shuffle=True)
    accelerator.prepare(model, optimizer, loader)
    sizes = []
    for _ in range(num_epochs):
        sizes.append(0)
        for (x,) in loader:
            accelerator.backward(model(x / 10).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            sizes[-1] += len(x)
    return sizes, model.weight.detach().clone()


def test_an_accelerator_saves_and_goes_on_by_its_options(tmp_path: Path):
    first = make(tmp_path, every=3)
    _, whole = train(first, 3)
    (line,) = first.end_run()
    assert line.startswith(f"saved step 3, 6, ..., 15 (5) in {tmp_path} · ")
    first.close()
    second = make(None, resume=str(tmp_path / "step_9"))
    sizes, weight = train(second, 3)
    assert sizes == [0, 2, 10]
    assert torch.equal(weight, whole)
    (line,) = second.end_run()
    assert line.startswith("resumed step 9 from")
    assert "epoch 2, 2 samples left" in line
    second.close()


def test_events_report_complete_checkpoints(tmp_path: Path):
    events: list[Event] = []

    class Keeping:
        def emit(self, event: Event) -> None:
            if isinstance(event, CheckpointSaved):
                assert (Path(event.url) / "manifest.json").exists()
                events.append(event)

    config = {"checkpoint": {"dir": str(tmp_path)}}
    accelerator = Accelerator(world=World(), cpu=True, config=config, sink=Keeping())
    accelerator.checkpoint_every(4)
    train(accelerator, 2)
    accelerator.close()
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [4, 8]
    assert from_message(to_message(events[0])) == events[0]


def test_switched_off_it_saves_nothing(tmp_path: Path):
    accelerator = make(tmp_path, every=1)
    accelerator.checkpoint_every()
    train(accelerator, 1)
    accelerator.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"steps": 1.5}, {"seconds": 0}, {"steps": True}, {"seconds": -1}])
def test_wrong_intervals_are_refused(arguments: dict[str, Any], tmp_path: Path):
    with pytest.raises(MisuseError, match="checkpoint_every"):
        make(tmp_path).checkpoint_every(**arguments)


def test_a_folder_is_needed():
    with pytest.raises(MisuseError, match=r"checkpoint\.dir"):
        make(None).checkpoint_every(5)


def test_order_of_many_samples_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch):
    """Going on at any position draws one permutation and makes no list of what is skipped."""
    from accel_nb.data import position

    length = 1_000_000
    sampler = torch.utils.data.RandomSampler(range(length))
    torch.manual_seed(5)
    whole = list(sampler)
    asked: list[int] = []
    plain: Callable[[Any], Any] = position._plain
    monkeypatch.setattr(position, "_plain", lambda order: asked.append(len(order)) or plain(order))
    for start in (1, length - 10, random.Random(0).randrange(length)):
        torch.manual_seed(5)
        head, rest = position._from(sampler, start, 16)
        assert head == whole[:16]
        assert next(rest) == whole[start]
        assert sum(asked) < length // 10, "the first index needs no list of the others"
        assert list(rest) == whole[start + 1 :]
        asked.clear()


def test_empty_passes_end_with_their_run(tmp_path: Path):
    first = make(tmp_path, every=3)
    train(first, 3)
    first.close()
    second = make(None, resume=str(tmp_path / "step_12"))
    loader = DataLoader(TensorDataset(torch.arange(10.0).unsqueeze(1)), batch_size=2, shuffle=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second.prepare(model, optimizer, loader)
    assert [len(x) for (x,) in loader] == []  # the first of two finished epochs
    second.begin_run()
    assert sum(len(x) for (x,) in loader) == 6  # what is left of the third
    assert sum(len(x) for (x,) in loader) == 10
    second.close()
