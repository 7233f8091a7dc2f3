"""What does a cell cost when the workers are warm?

A real kernel runs an empty cell on two workers, and calls the peer's launcher with a function that does nothing, in a
random order inside of each round, each in an execution of its own and timed inside of the kernel.
"""

from __future__ import annotations

import statistics

from benchmarks.measure import CELL_HELPERS, Figure, Kernel, Report, main, quantile, running_kernel, shuffled_rounds

EMPTY, REDUCE, PEER, PEER_REDUCE = (
    "empty cell", "cell with an all_reduce", "notebook_launcher, nothing", "notebook_launcher, an all_reduce",
)  # fmt: skip
_PEER = """
import contextlib, io
from accelerate import notebook_launcher
def _nothing():
    return None
def _reduce():
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    accelerator.reduce(torch.ones(1))
def _launch(function):
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        notebook_launcher(function, num_processes=2)
    return time.perf_counter() - started
"""
_CALLS = {
    EMPTY: '_cell("--cpus 2", "pass")',
    REDUCE: '_cell("--cpus 2", "import torch\\naccelerator.reduce(torch.ones(1));")',
    PEER: "_launch(_nothing)",
    PEER_REDUCE: "_launch(_reduce)",
}


def warm_cell(quick: bool = False) -> Report:
    """Time cells in one kernel, first without torch in it, then with it and in turn with the peer."""
    rounds, per_round, alone = (3, 10, 60) if quick else (15, 20, 250)
    with running_kernel() as kernel:
        kernel.run(CELL_HELPERS + "\n%load_ext accel_nb\n_wait_warm()")
        for _ in range(5):
            _time(kernel, EMPTY)
        without_torch = [_time(kernel, EMPTY) for _ in range(alone)]
        has_torch = kernel.run("import sys", "'torch' in sys.modules")
        kernel.run(_PEER)
        for name in _CALLS:
            _time(kernel, name)
        times: dict[str, list[float]] = {name: [] for name in _CALLS}
        ratios: list[float] = []
        for order in shuffled_rounds(list(_CALLS), rounds):
            for name in order:
                count = per_round if name in (EMPTY, REDUCE) else 1
                times[name] += [_time(kernel, name) for _ in range(count)]
            ratios.append(times[PEER][-1] / statistics.median(times[EMPTY][-per_round:]))
    report = Report(
        "Warm cell",
        "From the kernel to two workers and back, timed inside of a real kernel; the peer's launcher in turn with it.",
        ["", "n", "median ms", "p90 ms", "p99 ms"],
    )
    for name, values in ((f"{EMPTY}, no torch in the kernel", without_torch), *times.items()):
        report.add(name, len(values), *[f"{quantile(values, share) * 1000:.2f}" for share in (0.5, 0.9, 0.99)])
    for where, values in (("no torch in the kernel", without_torch), ("torch in the kernel", times[EMPTY])):
        report.figures += [
            Figure(f"empty cell, {where}: median", statistics.median(values) * 1000, 5, "ms"),
            Figure(f"empty cell, {where}: p99", quantile(values, 0.99) * 1000, 25, "ms"),
        ]
    report.figures.append(
        Figure("a notebook_launcher call is so many empty cells", statistics.median(ratios), 20, "x", "at least")
    )
    if has_torch:
        report.notes.append("torch was in the kernel from the start: something imported it")
    return report


def _time(kernel: Kernel, name: str) -> float:
    return float(kernel.run(f"_took = {_CALLS[name]}", "_took"))


if __name__ == "__main__":
    main(warm_cell)
