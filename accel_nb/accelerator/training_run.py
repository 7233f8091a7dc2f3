"""The runs of an accelerator: beginning, resuming, saving, interruption and end."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from accel_nb.accelerator.prepare.preparer import Preparer, known_length
from accel_nb.accelerator.state.resuming import RunResumer
from accel_nb.accelerator.state.save_report import CompletedSave, describe_saves, describe_unsaved
from accel_nb.accelerator.state.training_state import TrainingState
from accel_nb.accelerator.training.autosave import Autosave
from accel_nb.accelerator.training.lr_preview import RatePreview
from accel_nb.accelerator.training.run_control import ControlReceiver, RunController
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.config.sections import CheckpointOptions
from accel_nb.config.value_types import seconds_of
from accel_nb.data.loader import get_position
from accel_nb.errors import CheckpointError, MisuseError
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.process.secrets import redact
from accel_nb.telemetry.events import CheckpointSaved, EpochBegan, EventSink, NullEventSink


class TrainingRun:
    """The runs of one accelerator, one after the other: each cell, script or launch is a run.

    As the `RunObserver` of the accelerator it saves by interval or on request, resumes from a checkpoint before the
    first epoch that trains, and performs actions that the user requests during a run. Every rank makes the same calls.
    """

    def __init__(
        self,
        stepper: Stepper,
        comm: Communicator,
        sink: EventSink,
        options: CheckpointOptions,
        receiver: ControlReceiver | None,
    ) -> None:
        self._stepper = stepper
        self._comm = comm
        self._sink = sink
        self._options = options
        self._autosave: Autosave | None = None
        self._receiver = receiver
        self._run_controller = None if receiver is None else RunController(receiver, stepper, stepper.meter)
        self._state: TrainingState | None = None
        self._resumer: RunResumer | None = None
        self._saved: list[CompletedSave] = []
        self._first_step = 0
        self._loader_numbers = WeakKeyDictionary[DataLoader[Any], int]()
        self._next_number = itertools.count()
        self.schedule_observer: RatePreview | None = None
        """Reports the future learning rates of schedules; on rank 0 only, and if a sink receives its events."""

    def start(self, state: TrainingState, preparer: Preparer) -> None:
        """Begin the first run, when the components that it calls exist."""
        self._state = state
        self._resumer = RunResumer(state)
        rank = self._comm.world.rank
        if rank == 0 and not isinstance(self._sink, NullEventSink):
            self.schedule_observer = RatePreview(self._sink, rank, self._stepper, preparer.epoch_lengths)
        every = self._options.every
        if isinstance(every, str):
            self.save_every(seconds=seconds_of(every))
        else:
            self.save_every(steps=every)
        self._resumer.begin_run(self._options.resume)

    # --- events ---

    def on_loader_prepared(self, loader: DataLoader[Any]) -> None:
        """Resume a loader if a loaded checkpoint has a position for it."""
        if self._state is not None:
            self._state.resume_loader(loader)

    def on_loop_start(self, loader: DataLoader[Any]) -> None:
        """Report the beginning and the length of a loop, from which progress is computed."""
        rank = self._comm.world.rank
        if rank == 0 and not isinstance(self._sink, NullEventSink):
            num_steps = math.ceil((known_length(loader) or 0) / self._stepper.window.size)
            if loader not in self._loader_numbers:
                self._loader_numbers[loader] = next(self._next_number)
            number, epoch = self._loader_numbers[loader], get_position(loader).num_epochs
            self._sink.emit(EpochBegan(rank, self._stepper.meter.run_step, time.time(), num_steps, number, epoch))

    def on_epoch_start(self) -> None:
        """Load the checkpoint to resume from, before the first epoch that trains."""
        if self._resumer is not None:
            self._resumer.load_once()

    def on_batch_end(self) -> None:
        """Save if that is due, and run the requested actions that are due."""
        if self._autosave is not None and not self._stepper.is_joined:  # ranks without data exchange no messages
            self._autosave.on_batch_end()
        if self._run_controller is not None:
            self._run_controller.on_batch_end()

    def on_checkpoint_saved(self, saved: CompletedSave) -> None:
        """Record a checkpoint and report it to the sink."""
        self._saved.append(saved)
        rank, cost = self._comm.world.rank, saved.cost
        if rank == 0:
            url = redact(saved.url)
            step = self._stepper.meter.number_in_run(saved.step)
            self._sink.emit(CheckpointSaved(rank, step, time.time(), url, cost.stall_s, cost.write_s, cost.num_bytes))

    def on_checkpoint_loaded(self, step: int) -> None:
        """Count the interval between saves from the loaded step."""
        if self._autosave is not None:
            self._autosave.resume_from(step)

    # --- a run ---

    @property
    def has_trained(self) -> bool:
        """Whether an optimizer step was made since the run began."""
        return self._stepper.num_steps > self._first_step

    def begin(self, resume: str | None) -> None:
        """Begin a run; see `Accelerator.begin_run`."""
        assert self._resumer is not None
        self._saved.clear()
        if self._stepper.is_plain_cell and self._options.dir is None and resume is None:
            self._stepper.meter.step = 0
        self._stepper.meter.begin_run()
        self._first_step = self._stepper.num_steps
        for part in (self._autosave, self._run_controller, self.schedule_observer):
            if part is not None:
                part.begin_run()
        self._resumer.begin_run(resume)

    def end(self) -> list[str]:
        """Wait for the background save, and return lines, without secrets, about resumed and saved checkpoints."""
        assert self._state is not None
        assert self._resumer is not None
        self._stepper.flush()
        self._state.wait()
        lines = self._resumer.end_run()
        autosave = self._autosave
        if autosave and autosave.has_interval and not autosave.has_reached_boundary and self.has_trained:
            lines.append(
                "--every had no effect: no prepared DataLoader was iterated to train; save_state() saves at once"
            )
        lines += describe_saves(self._saved, self._options.dir, 0 if autosave is None else autosave.num_postponed)
        return list(map(redact, lines))

    def end_interrupted(self) -> list[str]:
        """Return lines about an interrupted run's checkpoints; waits for others only if all stop at the same step."""
        autosave = self._autosave
        if autosave is None or not self.has_trained:
            return []
        if autosave.stopped_step is None:
            return [describe_unsaved(self._saved)]
        stopped = f"stopped after step {self._stepper.meter.number_in_run(autosave.stopped_step):,}"
        try:
            lines = self.end()
        except (CheckpointError, RuntimeError) as error:  # another rank may have ended in the meantime
            return [redact(f"{stopped}, which was not saved: {error}")]
        if autosave.problem is not None:
            return [*lines, redact(f"{stopped}, which was not saved: {autosave.problem}")]
        return [*lines, f"{stopped}: --resume auto continues from there"]

    def fingerprint(self) -> str | None:
        """Return a digest of the weights that the run has trained; None if there are none, or ranks hold shards."""
        return self._stepper.replica_digest() if self.has_trained else None

    # --- saving and stopping on request ---

    def save_every(self, steps: int | None = None, seconds: float | None = None) -> None:
        """Set the interval between saves; see `Accelerator.checkpoint_every`."""
        state, stepper, folder = self._state, self._stepper, self._options.dir
        assert state is not None
        if folder is None:
            if steps is None and seconds is None:
                return
            raise MisuseError(
                "checkpoint_every() needs a folder: set checkpoint.dir (flag --checkpoint, or "
                "config={'checkpoint': {'dir': ...}})"
            )
        for name, value in (("steps", steps), ("seconds", seconds)):
            if value is not None and (isinstance(value, bool) or not value > 0 or (name == "steps" and value % 1)):
                raise MisuseError(f"checkpoint_every({name}={value!r}): give a number above 0, whole for steps")
        self._autosave = Autosave(
            self._comm,
            lambda: state.save(None, blocking=False),
            lambda: stepper.num_steps,
            steps=steps,
            seconds=seconds,
            is_behind=lambda: state.is_behind,
            on_stop=self._report_interrupt,
        )
        if self._run_controller is not None:
            self._run_controller.autosave = self._autosave

    def _report_interrupt(self) -> None:
        if self._receiver is not None:
            self._receiver.report_interrupt()

    def request_checkpoint(self) -> None:
        """Save at the end of a step soon; safe in signal handlers and threads."""
        if self._autosave is not None:
            self._autosave.request_save()

    def request_stop(self) -> bool:
        """Save and stop at the end of a step soon; return False if none is expected soon, or nothing saves."""
        return self._autosave is not None and self._autosave.request_stop()
