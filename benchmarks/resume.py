"""How long until the first batch, when a run resumes after its millionth sample?

One process, a shuffled dataset in memory. accel_nb loads a whole checkpoint, verifies it and reads the next
batch. The others have their position and all state in memory already: `skip_first_batches` of accelerate skips indices,
and a plain loop reads and discards batches. Saving and loading whole states is compared with accelerate's as well.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.runtime.world import World
from benchmarks.measure import ROOT, Figure, Report, main, shuffled_rounds

BATCH = 100
EARLY, LATE = 10_000, 1_000_000
OURS, OURS_EARLY = f"accel_nb, load_state and a batch at sample {LATE:,}", f"accel_nb, the same at sample {EARLY:,}"
SKIP = f"accelerate, skip_first_batches to sample {LATE:,}"
READ = f"plain loop that passes {LATE:,} samples"
STALL, SAVE, LOAD = "accel_nb, save_state(blocking=False)", "accel_nb, save_state", "accel_nb, load_state"
THEIR_SAVE, THEIR_LOAD = "accelerate, save_state", "accelerate, load_state"


def _dataset(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(num_samples, dtype=torch.float32).unsqueeze(1))


def _network(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that has stepped once: its state exists."""
    model = nn.Sequential(nn.Linear(1, width), *(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Resuming:
    """Training of a small model, saved at two positions of an epoch; a call returns seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._dataset = _dataset(LATE + 10 * BATCH)
        self.expected: dict[int, Tensor] = {}
        for position in (EARLY, LATE):
            self._save_at(position)
        self.accelerator, self.loader = self._make()
        self._theirs = accelerate.Accelerator(cpu=True)
        self._their_loader = self._theirs.prepare(DataLoader(self._dataset, BATCH, shuffle=True))
        self.calls: dict[str, Callable[[], float]] = {
            OURS: lambda: self.resume(LATE),
            OURS_EARLY: lambda: self.resume(EARLY),
            SKIP: lambda: _time_call(
                lambda: next(iter(self._theirs.skip_first_batches(self._their_loader, LATE // BATCH)))
            ),
            READ: lambda: _time_call(
                lambda: next(islice(DataLoader(self._dataset, BATCH, shuffle=True), LATE // BATCH, None))
            ),
        }

    def resume(self, position: int) -> float:
        """Load the checkpoint of a position and read a batch, which must be the next one of the original run."""
        found: list[Tensor] = []

        def act() -> None:
            self.accelerator.load_state(self._folder / str(position))
            found.append(next(iter(self.loader))[0])

        took = _time_call(act)
        assert torch.equal(found[0], self.expected[position]), "another batch than the uninterrupted run's"
        return took

    def _make(self) -> tuple[Accelerator, Any]:
        torch.manual_seed(0)
        accelerator = Accelerator(world=World(), cpu=True)
        loader = DataLoader(self._dataset, BATCH, shuffle=True)
        accelerator.prepare(*_network(8), loader)
        return accelerator, loader

    def _save_at(self, position: int) -> None:
        accelerator, loader = self._make()
        batches: Iterator[Any] = iter(loader)
        for _ in range(position // BATCH):
            next(batches)
            with accelerator.accumulate():
                pass
        # A batch that is read after the last step counts as not trained on: save before reading it.
        accelerator.save_state(self._folder / str(position))
        self.expected[position] = next(batches)[0]
        accelerator.close()


class States:
    """Whole states of one model, saved and loaded by both; a call returns seconds."""

    def __init__(self, folder: Path, width: int) -> None:
        self._folder = folder
        torch.manual_seed(0)
        self._ours = Accelerator(world=World(), cpu=True)
        model, optimizer = _network(width)
        self.num_bytes = 3 * sum(value.numel() * value.element_size() for value in model.parameters())
        self._ours.prepare(model, optimizer)
        self._theirs = accelerate.Accelerator(cpu=True)
        self._theirs.prepare(*_network(width))
        self._ours.save_state(folder / "kept")
        self._theirs.save_state(str(folder / "theirs"))
        self.calls: dict[str, Callable[[], float]] = {
            STALL: self.stall,
            SAVE: lambda: _time_call(lambda: self._ours.save_state(folder / "ours")),
            THEIR_SAVE: lambda: _time_call(self._save_theirs),
            LOAD: lambda: _time_call(lambda: self._ours.load_state(folder / "kept")),
            THEIR_LOAD: lambda: _time_call(lambda: self._theirs.load_state(str(folder / "theirs"))),
        }

    def stall(self) -> float:
        """Time a background save until it returns; the rest of it is not timed."""
        took = _time_call(lambda: self._ours.save_state(self._folder / "background", blocking=False))
        self._ours.wait_for_checkpoint()
        return took

    def close(self) -> None:
        """Stop the thread of background saves."""
        self._ours.close()

    def _save_theirs(self) -> None:
        self._theirs.save_state(str(self._folder / "theirs"))
        for path in (self._folder / "theirs").iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def resume(quick: bool = False) -> Report:
    """Measure each way in turn, in a new order each round; the first round warms up."""
    rounds, width = (3, 512) if quick else (9, 2048)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=ROOT) as folder:
        resuming, states = Resuming(Path(folder)), States(Path(folder), width)
        calls = {**resuming.calls, **states.calls}
        times: dict[str, list[float]] = {name: [] for name in calls}
        try:
            for number, order in enumerate(shuffled_rounds(list(calls), rounds + 1)):
                for name in order:
                    gc.collect()
                    os.sync()
                    took = calls[name]()
                    if number:
                        times[name].append(took)
        finally:
            states.close()
            resuming.accelerator.close()
    report = Report(
        "Resume",
        f"A shuffled dataset of {LATE + 10 * BATCH:,} samples, batches of {BATCH}; states of "
        f"{states.num_bytes / 1e6:.0f} MB; one process, a local disk.",
        ["", "n", "median ms", "fastest"],
    )
    for name, values in times.items():
        report.add(name, len(values), f"{1e3 * statistics.median(values):.1f}", f"{1e3 * min(values):.1f}")
    median = {name: statistics.median(values) for name, values in times.items()}
    report.figures += [
        Figure(f"resume at sample {LATE:,}", 1e3 * median[OURS], 50, "ms"),
        Figure("reading what is passed / resume", median[READ] / median[OURS], 100, "x", "at least"),
        Figure("resume / accelerate's skip_first_batches", median[OURS] / median[SKIP], 1, "x"),
        Figure("stall of a save / accelerate's save", median[STALL] / median[THEIR_SAVE], 1, "x"),
        Figure(
            "durable save and verified load / accelerate's",
            (median[SAVE] + median[LOAD]) / (median[THEIR_SAVE] + median[THEIR_LOAD]),
            1,
            "x",
        ),
    ]
    report.notes.append("The batch after each resume was compared with the uninterrupted run's.")
    report.notes.append("accelerate's files are synced one by one; what it saves is not verified when it is loaded.")
    return report


def _time_call(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(resume)
