"""What does a launch cost, an interrupt, a death?

A real kernel calls both launchers in turn with the same function, in a random order inside of each round; interrupts
arrive while one rank waits in a collective that the other never calls; deaths are timed from the signal.
"""

from __future__ import annotations

import statistics

from benchmarks.measure import Figure, Kernel, Report, main, quantile, running_kernel, shuffled_rounds

OWN, PEER = "notebook_launcher", "accelerate's notebook_launcher"
_LAUNCHES = """
import contextlib, io, os, signal, time
import torch
import accel_nb
from accelerate import notebook_launcher as _peer
def _reduce():
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    accelerator.reduce(torch.ones(1))
def _own_reduce():
    import torch
    from accel_nb import Accelerator
    accelerator = Accelerator()
    accelerator.reduce(torch.ones(1))
def _time_own():
    started = time.perf_counter()
    accel_nb.notebook_launcher(_own_reduce, num_processes=2, panel=False)
    return time.perf_counter() - started
def _time_peer():
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        _peer(_reduce, num_processes=2)
    return time.perf_counter() - started
def _stuck():
    import os, threading, time, torch, torch.distributed as dist
    if os.environ["RANK"] == "0":
        dist.all_reduce(torch.ones(1))
    threading.Event().wait()
def _interrupt():
    import threading
    pressed = []
    def press():
        pressed.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)
    timer = threading.Timer(0.3, press)
    timer.start()
    try:
        accel_nb.notebook_launcher(_stuck, num_processes=2, panel=False)
    except KeyboardInterrupt:
        pass
    return time.perf_counter() - pressed[0]
def _die(path):
    import os, signal, time, torch, torch.distributed as dist
    if os.environ["RANK"] == "1":
        with open(path, "w") as file:
            file.write(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
def _death():
    import tempfile
    path = os.path.join(tempfile.mkdtemp(), "at")
    try:
        accel_nb.notebook_launcher(_die, (path,), 2, panel=False)
    except accel_nb.errors.WorkerDied:
        named = time.monotonic()
    with open(path) as file:
        died = float(file.read())
    accel_nb.notebook_launcher(_own_reduce, num_processes=2, panel=False)
    return named - died, time.monotonic() - died
"""


def launcher(quick: bool = False) -> Report:
    """Time launches of both in turn, then interrupts and deaths."""
    rounds, repeats = (3, 5) if quick else (12, 30)
    with running_kernel() as kernel:
        kernel.run(_LAUNCHES)
        first = _seconds(kernel, "_time_own()")
        _seconds(kernel, "_time_peer()")
        times: dict[str, list[float]] = {OWN: [], PEER: []}
        for order in shuffled_rounds([OWN, PEER], rounds):
            for name in order:
                call, count = ("_time_own()", 10) if name == OWN else ("_time_peer()", 1)
                times[name] += [_seconds(kernel, call) for _ in range(count)]
        interrupts = [_seconds(kernel, "_interrupt()") for _ in range(repeats)]
        deaths = [kernel.run("_took = _death()", "_took") for _ in range(repeats)]
    named, usable = [float(death[0]) for death in deaths], [float(death[1]) for death in deaths]
    report = Report(
        "Launcher",
        "Two workers and an all_reduce, in turn with accelerate's launcher in one kernel; interrupts with one rank "
        "stuck in a collective; a rank that is killed.",
        ["", "n", "median ms", "p90 ms"],
    )
    for name, values in (
        *times.items(),
        ("interrupt to exception", interrupts),
        ("death to exception", named),
        ("death to the end of the next launch", usable),
    ):
        report.add(name, len(values), *[f"{quantile(values, share) * 1000:.1f}" for share in (0.5, 0.9)])
    ratio = statistics.median(times[PEER]) / statistics.median(times[OWN])
    report.figures = [
        Figure("the peer's launch is so many of ours", ratio, 20, "x", "at least"),
        Figure("interrupt to exception, median", statistics.median(interrupts), 0.5, "s"),
        Figure("death to WorkerDied, median", statistics.median(named), 0.25, "s"),
        Figure("death to the end of the next launch, median", statistics.median(usable), 1.0, "s"),
    ]
    report.notes.append(f"the first launch of the kernel, with the import of torch, took {first:.2f} s")
    return report


def _seconds(kernel: Kernel, call: str) -> float:
    return float(kernel.run(f"_took = {call}", "_took"))


if __name__ == "__main__":
    main(launcher)
