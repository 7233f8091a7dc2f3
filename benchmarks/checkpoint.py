"""What does a checkpoint cost: the stall of training, the durable write, and the load?

One process, a model and its Adam state. The copy that a background save makes is compared with a plain clone of the
same tensors; a durable save with `torch.save` and an fsync of the same bytes; loading with every byte verified with
safetensors loading the same bytes unverified. Loaded tensors are read in the same way after each load.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_nb.checkpoint.background_save import CheckpointSaver
from accel_nb.checkpoint.load import materialize, open_checkpoint
from accel_nb.checkpoint.manifest import CheckpointOrigin
from accel_nb.checkpoint.store import LocalStore
from accel_nb.runtime.distributed.communicator import LocalComm
from benchmarks.measure import ROOT, Figure, Report, main, shuffled_rounds

STALL, CLONE = "accel_nb, until a background save lets go", "clone of every tensor"
SAVE, TORCH_SAVE = "accel_nb, until a save is durable", "torch.save and fsync"
LOAD, SAFETENSORS = "accel_nb, verified load", "safetensors load, unverified"
COLD_LOAD, COLD_SAFETENSORS = f"{LOAD}, from disk", f"{SAFETENSORS}, from disk"
PAIRS = ((STALL, CLONE, 1.2), (SAVE, TORCH_SAVE, 1.15), (COLD_LOAD, COLD_SAFETENSORS, 1.15), (LOAD, SAFETENSORS, 1.15))


class Contest:
    """A state, and the ways to save and load it; a call of each returns seconds."""

    def __init__(self, folder: Path, num_layers: int) -> None:
        self._folder = folder
        torch.manual_seed(0)
        self.state: dict[str, Any] = {
            kind: {f"layer{n}": torch.randn(2048, 2048) for n in range(num_layers)}
            for kind in ("weights", "exp_avg", "exp_avg_sq")
        }
        self.flat = {f"{kind}/{name}": value for kind, part in self.state.items() for name, value in part.items()}
        self.num_bytes = sum(value.numel() * value.element_size() for value in self.flat.values())
        self._saver = CheckpointSaver(LocalComm(), torch.device("cpu"))
        self._store = LocalStore(str(folder / "ours"))
        save_file(self.flat, folder / "theirs.safetensors")
        self._save("loaded", blocking=True)
        self.calls: dict[str, Callable[[], float]] = {
            STALL: self.stall,
            CLONE: lambda: _time_call(lambda: [value.clone() for value in self.flat.values()]),
            SAVE: self.save,
            TORCH_SAVE: self.torch_save,
            LOAD: lambda: _time_call(lambda: _read_values(self.load())),
            SAFETENSORS: lambda: _time_call(lambda: _read_values(load_file(folder / "theirs.safetensors"))),
            COLD_LOAD: lambda: self.cold(LOAD),
            COLD_SAFETENSORS: lambda: self.cold(SAFETENSORS),
        }

    def stall(self) -> float:
        """Time a background save until it returns; the rest of it is not timed."""
        took = _time_call(lambda: self._save("staged", blocking=False))
        self._saver.wait()
        self._store.remove("staged")
        return took

    def save(self) -> float:
        """Time a save under a new name."""
        took = _time_call(lambda: self._save("saved", blocking=True))
        self._store.remove("saved")
        return took

    def torch_save(self) -> float:
        """Time `torch.save` with fsync, as a careful script saves, under a new name."""
        took = _time_call(self._torch_save)
        (self._folder / "theirs.pt").unlink()
        return took

    def cold(self, name: str) -> float:
        """Time a load of files that are not in the page cache, as in a new process after a crash."""
        gc.collect()
        for path in (*self._folder.glob("*.safetensors"), *self._folder.glob("ours/loaded/*")):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return self.calls[name]()

    def load(self) -> dict[str, Tensor]:
        """Return the state by flat names, verified."""
        found = materialize(open_checkpoint(self._folder / "ours" / "loaded", LocalComm()).read_tree())
        return {f"{kind}/{name}": value for kind, part in found.items() for name, value in part.items()}

    def close(self) -> None:
        """Stop the thread of background saves."""
        self._saver.close()

    def _save(self, name: str, *, blocking: bool) -> None:
        facts = CheckpointOrigin(run="benchmark", step=0, world_size=1, strategy="single")
        self._saver.save(self._store, name, self.state, facts, blocking=blocking)

    def _torch_save(self) -> None:
        path = self._folder / "theirs.pt"
        with open(path, "wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())


def checkpoint(quick: bool = False) -> Report:
    """Measure each way in turn, in a new order each round; the first round warms up."""
    rounds, num_layers = (3, 6) if quick else (9, 16)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=ROOT) as folder:
        contest = Contest(Path(folder), num_layers)
        try:
            times = {name: [] for name in contest.calls}
            for number, order in enumerate(shuffled_rounds(list(contest.calls), rounds + 1)):
                for name in order:
                    gc.collect()
                    os.sync()  # so that no time includes writes of an earlier call
                    took = contest.calls[name]()
                    if number:
                        times[name].append(took)
            found = contest.load()
            assert all(torch.equal(found[name], value) for name, value in contest.flat.items())
        finally:
            contest.close()
    report = Report(
        "Checkpoint",
        f"{contest.num_bytes / 1e6:.0f} MB of weights and Adam state, one process, a local disk.",
        ["", "n", "median s", "GB/s"],
    )
    for name, values in times.items():
        median = statistics.median(values)
        report.add(name, len(values), f"{median:.3f}", contest.num_bytes / 1e9 / median)
    for (ours, theirs, limit), what in zip(
        PAIRS, ("stall of a save", "durable save", "verified load", "verified load, warm"), strict=True
    ):
        ratios = sorted(a / b for a, b in zip(times[ours], times[theirs], strict=True))
        spread = (ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10])
        ratio = statistics.median(times[ours]) / statistics.median(times[theirs])
        report.figures.append(Figure(f"{what} / {theirs}", ratio, limit, "x", spread=spread))
    report.notes.append("Every byte that was loaded was compared with what was saved.")
    report.notes.append("The ranges are those of the rounds, without the outermost tenth on either side.")
    return report


def _time_call(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _read_values(tensors: dict[str, Tensor]) -> float:
    return sum(float(value.sum()) for value in tensors.values())


if __name__ == "__main__":
    main(checkpoint)
