"""The accelerator in one process."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_nb.accelerator import Accelerator
from accel_nb.errors import ConfigError, MisuseError, NanLossError
from accel_nb.telemetry.events import EpochBegan, Event, MemorySample, MetricLogged, StepDone, WorkerPrepared


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def _parts(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def _step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("built", ["before", "after"])
def test_schedulers_do_not_warn(built: str) -> None:
    model, optimizer = _parts()
    accelerator = Accelerator(cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if built == "before":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            accelerator.prepare(model, optimizer, scheduler)
        else:
            accelerator.prepare(model, optimizer)
            scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        _step(accelerator, model, optimizer)
        scheduler.step()
    assert scheduler.get_last_lr() == [0.05]


def test_scheduler_counts_optimizer_steps_by_batch_and_epochs_by_epoch() -> None:
    model, optimizer = _parts()
    by_batch = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1.0)
    by_epoch = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1.0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.prepare(model, optimizer, by_batch, by_epoch)
    for _ in range(2):
        for _ in range(4):
            _step(accelerator, model, optimizer)
            by_batch.step()
        by_epoch.step()
    assert by_batch.last_epoch == 4
    assert by_epoch.last_epoch == 2


def test_step_and_zero_grad_wait_for_the_window() -> None:
    model, optimizer = _parts()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.prepare(model, optimizer)
    before = model.weight.detach().clone()  # type: ignore[union-attr, operator]
    _step(accelerator, model, optimizer)
    assert torch.equal(model.weight, before)  # type: ignore[arg-type]
    assert model.weight.grad is not None  # type: ignore[union-attr]
    assert not accelerator.sync_gradients
    _step(accelerator, model, optimizer)
    assert not torch.equal(model.weight, before)  # type: ignore[arg-type]
    assert model.weight.grad is None  # type: ignore[union-attr]
    assert accelerator.sync_gradients
    accelerator.gradient_accumulation_steps = 1
    _step(accelerator, model, optimizer)
    assert model.weight.grad is None  # type: ignore[union-attr]
    with pytest.raises(MisuseError, match="at least 1"):
        accelerator.gradient_accumulation_steps = 0


def test_a_window_ends_with_its_optimizer() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)

    def train(steps: int) -> float:
        model, optimizer = _parts()
        accelerator.prepare(model, optimizer)
        for _ in range(steps):
            _step(accelerator, model, optimizer)
        accelerator.free_memory()
        return float(model.weight.sum())

    expected = train(8)
    train(6)  # ends in a window
    assert train(8) == expected
    accelerator.close()


def _train_by_hand(steps: int, by_hand: int, *, reads_ahead: bool = False, blocks: bool = False) -> list[float]:
    """Train on ten batches with a step after each ``by_hand`` of them, and after the last; return the weights."""
    model, optimizer = _parts()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    data = torch.arange(20.0).reshape(10, 2) / 20
    _, _, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=1))  # pyright: ignore[reportArgumentType]
    batches = read = iter(loader)
    if reads_ahead:
        batches = (batch for _ in range(3) for batch in list(islice(read, by_hand)))
    for number, batch in enumerate(batches):
        with accelerator.accumulate(model) if blocks else nullcontext():
            accelerator.backward(model(batch).square().mean())
            if blocks or (number + 1) % by_hand == 0 or number == 9:
                optimizer.step()
                optimizer.zero_grad()
    accelerator.close()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def test_a_script_may_step_by_itself_after_each_window() -> None:
    expected = _train_by_hand(4, 1, blocks=True)
    assert _train_by_hand(4, 4) == pytest.approx(expected, abs=1e-6)
    assert _train_by_hand(4, 1) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("by_hand", "reads_ahead"), [(2, False), (4, True)])
def test_accumulating_by_hand_and_by_option_at_once_is_refused(by_hand: int, reads_ahead: bool) -> None:
    with pytest.raises(MisuseError, match=r"gradient_accumulation_steps is 4.*accelerator\.accumulate.*weight="):
        _train_by_hand(4, by_hand, reads_ahead=reads_ahead)


def test_an_accelerator_is_neither_copied_nor_sent() -> None:
    for take_along in (copy.deepcopy, pickle.dumps):
        with pytest.raises(MisuseError, match="build it inside of the function"):
            take_along(Accelerator(cpu=True))


def test_an_optimizer_that_was_forgotten_is_said() -> None:
    model, optimizer = _parts()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.prepare(model)
    with pytest.warns(UserWarning, match=r"no optimizer is prepared.*2 batches"):
        _step(accelerator, model, optimizer)
    accelerator.prepare(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(accelerator, model, optimizer)


def test_what_is_no_loss_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(MisuseError, match="float"):
        accelerator.backward(1.0)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="no gradient"):
        accelerator.backward(torch.ones(()))
    with pytest.raises(MisuseError, match=r"shape \(2,\).*\.mean\(\)"):
        accelerator.backward(torch.ones(2, requires_grad=True))


def test_scheduler_without_its_optimizer_is_refused() -> None:
    _, optimizer = _parts()
    with pytest.raises(MisuseError, match="prepare both"):
        Accelerator(cpu=True).prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_strategy_that_does_not_fit_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"at least 2 workers.*auto"):
        Accelerator(cpu=True, strategy="ddp")


def test_dropped_accelerator_is_gone_and_its_objects_can_be_taken_over() -> None:
    model, optimizer = _parts()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(model, optimizer)
    accelerator.on_main_process(lambda: None)
    gone = weakref.ref(accelerator)
    gc.disable()
    try:
        del accelerator
        assert gone() is None
    finally:
        gc.enable()
    again = Accelerator(cpu=True)
    again.prepare(model, optimizer)
    _step(again, model, optimizer)
    assert type(model) is nn.Linear


def test_an_error_while_closing_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _parts()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)

    def flush() -> None:
        raise NanLossError(0, 1)

    monkeypatch.setattr(accelerator.components.stepper.meter, "flush", flush)
    with pytest.raises(NanLossError):
        accelerator.close()
    assert "step" not in vars(optimizer)
    assert not accelerator.prepared_objects


def test_an_interrupt_while_objects_are_prepared_restores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _parts()
    accelerator = Accelerator(cpu=True)

    def record(bundle: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(accelerator.components.stepper, "add", record)
        with pytest.raises(KeyboardInterrupt):
            accelerator.prepare(model, optimizer)
    assert "step" not in vars(optimizer)
    assert not accelerator.prepared_objects
    accelerator.prepare(model, optimizer)
    _step(accelerator, model, optimizer)
    accelerator.close()


def test_state_of_an_optimizer_is_moved_as_it_is() -> None:
    parameter = nn.Parameter(torch.empty(2, dtype=torch.bfloat16, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    [group] = optimizer.param_groups
    states: Any = optimizer.state
    states[parameter] = {"average": torch.ones(2), "step": torch.tensor(3.0), "history": [torch.ones(2)], "name": "x"}
    states["calls"] = 7  # PyTorch stores entries of other keys too
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(optimizer)
    moved = [states[parameter]["average"], *states[parameter]["history"]]
    assert [(value.device.type, value.dtype) for value in moved] == [("meta", torch.float32)] * 2
    assert (states[parameter]["step"].device.type, states[parameter]["name"], states["calls"]) == ("cpu", "x", 7)
    assert optimizer.param_groups[0] is group
    accelerator.close()


def test_loader_is_freed_with_the_last_name_of_it_and_of_its_accelerator() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(6), 2))
    iterator = iter(loader)
    next(iterator)
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del loader, iterator
        assert accelerator.prepared_objects == (gone(),)
        del accelerator
        assert gone() is None
    finally:
        gc.enable()


def test_loader_outlives_its_accelerator() -> None:
    accelerator = Accelerator(cpu=True, batch="global")
    loader = accelerator.prepare(DataLoader(range(6), 2))
    del accelerator
    gc.collect()
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_released_loader_is_not_kept() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(6), 2))
    accelerator.free_memory(loader)
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert accelerator.prepared_objects == ()


def test_events_of_a_run() -> None:
    recorder = Recorder()
    model, optimizer = _parts(lr=0.25)
    accelerator = Accelerator(cpu=True, sink=recorder)
    accelerator.prepare(model, optimizer)
    _step(accelerator, model, optimizer)
    accelerator.log({"accuracy": torch.tensor(0.5)}, step=7)
    with pytest.raises(MisuseError, match="'name'"):
        accelerator.log({"name": "text"})
    (prepared,) = recorder.of(WorkerPrepared)
    assert prepared.objects == ("Linear (3 parameters)", "SGD")
    (step,) = recorder.of(StepDone)
    assert (step.step, step.learning_rate, step.skipped) == (1, 0.25, False)
    (sample,) = recorder.of(MemorySample)
    assert (sample.parameters, sample.gradients, sample.optimizer) == (12, 12, 0)
    (metric,) = recorder.of(MetricLogged)
    assert (metric.name, metric.value, metric.step) == ("accuracy", 0.5, 7)


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(4, 2))

    def __len__(self) -> int:
        raise NotImplementedError("the length of this stream is not known")


def test_a_stream_may_have_a_length_that_it_refuses_to_return() -> None:
    model, optimizer = _parts()
    sink, loader = Recorder(), DataLoader(Endless(), batch_size=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    accelerator = Accelerator(cpu=True, sink=sink)
    accelerator.prepare(model, optimizer, scheduler, loader)
    for x in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
        scheduler.step()
    assert [event.num_steps for event in sink.of(EpochBegan)] == [0]
    assert len(sink.of(StepDone)) == 2
    accelerator.close()


def test_loops_over_loaders_are_reported_with_their_epochs_also_of_a_resumed_run(tmp_path: Path) -> None:
    def train(num_epochs: int, resume: str | None = None) -> list[tuple[int, ...]]:
        recorder = Recorder()
        model, optimizer = _parts()
        accelerator = Accelerator(cpu=True, sink=recorder, gradient_accumulation_steps=4)
        loader, validation = DataLoader(torch.ones(8, 2)), DataLoader(torch.ones(2, 2))  # type: ignore[arg-type]
        accelerator.prepare(model, optimizer, loader, validation)
        accelerator.begin_run(resume)
        for _ in range(num_epochs):
            for inputs in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(inputs).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            list(validation)
        accelerator.save_state(tmp_path / str(num_epochs))
        return [(event.step, event.num_steps, event.loader, event.epoch) for event in recorder.of(EpochBegan)]

    assert train(2) == [(0, 2, 0, 0), (2, 1, 1, 0), (2, 2, 0, 1), (4, 1, 1, 1)]
    loops = [loop for loop in train(3, resume=str(tmp_path / "2")) if loop[2] == 0]
    assert loops == [(4, 2, 0, 2)] * 3, "two epochs have ended"


def test_a_loss_that_is_nan_is_named_and_leaves_the_model_alone() -> None:
    model, optimizer = _parts()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    before = [value.detach().clone() for value in model.parameters()]
    with pytest.raises(NanLossError, match="step 1 is NaN on rank 0"):
        accelerator.backward(model(torch.full((1, 2), torch.nan)).sum())
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_without_checks_nan_is_no_error() -> None:
    recorder = Recorder()
    model, optimizer = _parts()
    accelerator = Accelerator(cpu=True, sink=recorder, config={"sentinels": False})
    accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.full((1, 2), torch.nan)).sum())
    optimizer.step()
    assert recorder.of(StepDone)[0].loss != recorder.of(StepDone)[0].loss


def test_forward_of_the_instance_and_hooks_are_kept() -> None:
    model, _ = _parts()
    calls: list[str] = []
    own = model.forward
    model.forward = lambda x: calls.append("own") or own(x)  # type: ignore[method-assign, func-returns-value]
    model.register_forward_hook(lambda *_: calls.append("hook"))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(model)
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert calls == ["own", "hook"]
    accelerator.unwrap_model(model)
    model(torch.ones(1, 2))
    assert calls == ["own", "hook", "own", "hook"]
