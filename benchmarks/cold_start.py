"""How long until the first cell trains: imports, `%load_ext`, the warm-up behind it, and the first cell itself.

Imports are timed in fresh interpreters. The first cell and the peer's first launch run in the same fresh kernels, in a
random order, after the peer and torch have been imported there: both times are of processes and groups only.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.measure import CELL_HELPERS, ROOT, Figure, Report, main, running_kernel, shuffled_rounds

_IMPORT = "import sys, time; t = time.perf_counter(); import {}; print(time.perf_counter() - t, 'torch' in sys.modules)"
_FIRST_CELL = '''
_started = time.monotonic()
_ip.run_cell_magic("accelerate", "--cpus 2", """
import time, torch
accelerator.reduce(torch.ones(1))
reduced_at = time.monotonic()
""")
_took = reduced_at - _started
'''
_PEER = """
import os
from accelerate import Accelerator, notebook_launcher
def _reduce(descriptor):
    import torch
    accelerator = Accelerator(cpu=True)
    accelerator.reduce(torch.ones(1))
    os.write(descriptor, b"%.9f " % time.monotonic())
"""
_PEER_CALL = """
import contextlib, io
_reader, _writer = os.pipe()
_started = time.monotonic()
with contextlib.redirect_stdout(io.StringIO()):
    notebook_launcher(_reduce, args=(_writer,), num_processes=2)
_took = max(map(float, os.read(_reader, 1000).split())) - _started
os.close(_reader), os.close(_writer)
"""
OURS, PEER = "first cell to the first all_reduce", "notebook_launcher's first all_reduce"


def cold_start(quick: bool = False) -> Report:
    """Time fresh interpreters, then fresh kernels."""
    names = ["accel_nb", "accelerate", "torch"]
    imports: dict[str, list[float]] = {name: [] for name in names}
    torch_importers = set()
    for order in shuffled_rounds(names, 2 if quick else 4):
        for name in order:
            seconds, has_torch = _time_import(name)
            imports[name].append(seconds)
            if has_torch:
                torch_importers.add(name)
    loads, warm_ups, firsts, torch_after_load = [], [], {OURS: [], PEER: []}, False
    for order in shuffled_rounds([OURS, PEER], 2 if quick else 5, seed=1):
        with running_kernel() as kernel:
            code = "import time; _t = time.perf_counter()\n%load_ext accel_nb\n_took = time.perf_counter() - _t"
            loads.append(kernel.run(code, "_took"))
            torch_after_load |= kernel.run("import sys", "'torch' in sys.modules")
            warm_ups.append(kernel.run(CELL_HELPERS + "\n_took = _wait_warm()", "_took"))
            kernel.run(_PEER)
            for name in order:
                firsts[name].append(kernel.run(_FIRST_CELL if name == OURS else _PEER_CALL, "_took"))
    report = Report(
        "Cold start", "Seconds, medians over fresh interpreters and fresh kernels.", ["", "n", "median s", "worst s"]
    )
    rows = {f"import {name}": imports[name] for name in names}
    rows |= {"%load_ext accel_nb": loads, "zygote warm, after %load_ext": warm_ups, **firsts}
    for name, values in rows.items():
        report.add(name, len(values), f"{statistics.median(values):.3f}", f"{max(values):.3f}")
    report.figures = [
        Figure("import accel_nb", statistics.median(imports["accel_nb"]), 0.15, "s"),
        Figure("import accel_nb imports torch", float("accel_nb" in torch_importers), 0, "(0 is no)"),
        Figure("%load_ext accel_nb", statistics.median(loads), 0.3, "s"),
        Figure("%load_ext accel_nb imports torch", float(torch_after_load), 0, "(0 is no)"),
        Figure(OURS, statistics.median(firsts[OURS]), 0.3, "s"),
    ]
    ratio = statistics.median(peer / ours for ours, peer in zip(firsts[OURS], firsts[PEER], strict=True))
    report.notes.append(f"The peer's first all_reduce takes {ratio:.1f} x as long as ours (median over kernels).")
    report.notes.append("The peer's time leaves out its import in the kernel, which stands in the table.")
    return report


def _time_import(name: str) -> tuple[float, bool]:
    words = subprocess.check_output([sys.executable, "-c", _IMPORT.format(name)], cwd=ROOT, text=True).split()
    return float(words[0]), words[1] == "True"


if __name__ == "__main__":
    main(cold_start)
