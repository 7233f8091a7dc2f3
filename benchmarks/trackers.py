"""What does `log` cost the training thread, with no tracker and with three?

A loop of torch operations of about 0.2 ms logs two numbers a step. Three trackers: JSONL, TensorBoard, and one that
takes 0.2 ms a call, as one over a network may. Measured is the time inside of `log`, during which training waits, in
blocks by turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

from benchmarks.measure import Figure, Report, main, median_interval, shuffled_rounds

STEPS = 200
LIMIT_US = 5.0


def trackers(quick: bool = False) -> Report:
    """Measure blocks of steps with each number of trackers."""
    import torch

    from accel_nb import Accelerator, GeneralTracker

    class Remote(GeneralTracker):
        name = "remote"

        def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
            time.sleep(0.0002)

    torch.set_num_threads(1)
    rounds = 10 if quick else 50
    report = Report(
        "Trackers",
        f"Inside of `accelerator.log` of two numbers ({rounds} rounds of {STEPS} steps).",
        ["", "us/call, median", "95 % interval"],
    )
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        ways: dict[str, Accelerator] = {}
        for name, chosen in {"no tracker": None, "three trackers": ["jsonl", "tensorboard", Remote()]}.items():
            ways[name] = Accelerator(cpu=True, log_with=chosen, project_dir=folder)
            ways[name].init_trackers("run")
        work = torch.randn(160, 160)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for order in shuffled_rounds(list(ways), rounds):
            for name in order:
                times[name].append(_block(ways[name], work))
        for accelerator in ways.values():
            accelerator.close()
    for name in ways:
        low, high = median_interval(times[name])
        report.add(name, statistics.median(times[name]), f"{low:.2f} to {high:.2f}")
    value, spread = statistics.median(times["three trackers"]), median_interval(times["three trackers"])
    report.figures.append(Figure("log of two numbers, three trackers", value, LIMIT_US, "us", spread=spread))
    return report


def _block(accelerator: Any, work: Any) -> float:
    """Return the duration of one call in microseconds: the median of a block."""
    walls: list[float] = []
    for step in range(STEPS):
        (work @ work).sum()
        started = time.perf_counter()
        accelerator.log({"loss": 0.5, "accuracy": 0.25}, step=step)
        walls.append(time.perf_counter() - started)
    return statistics.median(walls) * 1e6


if __name__ == "__main__":
    main(trackers)
