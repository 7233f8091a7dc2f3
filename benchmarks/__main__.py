"""Run every benchmark in a process of its own and write ``benchmarks/RESULTS.md``.

``python -m benchmarks [--quick] [NAME ...]``
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
import uuid
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks.measure import ROOT, Report, load_report, table

NAMES = (
    "step_overhead",
    "private_ways",
    "division",
    "facade_cost",
    "loader_cost",
    "warm_cell",
    "launcher",
    "launch",
    "cold_start",
    "idle_memory",
    "weights_back",
    "panel_cost",
    "panel_scale",
    "trackers",
    "checkpoint",
    "resume",
    "big_model",
    "forecast",
    "sharding",
    "zero",
    "mesh",
    "nodes",
)
INTERPRETERS = {
    "nodes": Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    / "accel_nb"
    / "engines"
    / "bin"
    / "python"
}
"""Benchmarks that need packages of another environment, which `make bench` has installed."""
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
_MARK = "BENCHMARK_RUN"


def run_all() -> int:
    """Run the chosen benchmarks, and return how many failed to run."""
    parser = argparse.ArgumentParser(description="Run the benchmarks, each in a process of its own.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run; all if none: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes no results")
    options = parser.parse_args()
    if wrong := [name for name in options.names if name not in NAMES]:
        parser.error(f"no benchmark {', '.join(wrong)}; there are {', '.join(NAMES)}")
    names = options.names or NAMES
    load = os.getloadavg()
    started = time.monotonic()
    reports: list[Report] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for name in names:
            report = _run_benchmark(name, Path(folder) / name, quick=options.quick)
            if isinstance(report, Report):
                reports.append(report)
            else:
                failures.append(f"{name}: {report}")
    minutes = (time.monotonic() - started) / 60
    text = "\n".join(
        [
            "# Results of the benchmarks\n",
            "Written by `make bench`; medians, contestants in turn inside of one run. The ratios are what to read.\n",
            _machine(load, minutes),
            _summary(reports),
            *(report.markdown() for report in reports),
            *(f"FAILED {failure}\n" for failure in failures),
        ]
    )
    print(_summary(reports))
    print(*(f"FAILED {failure}" for failure in failures), f"{minutes:.1f} minutes", sep="\n")
    if options.quick or options.names:
        print("RESULTS.md is written by a full run only")
    else:
        RESULTS.write_text(text)
        print(f"wrote {RESULTS.relative_to(ROOT)}")
    return len(failures)


def _run_benchmark(name: str, path: Path, *, quick: bool) -> Report | str:
    """Run one benchmark and return its report, or a description of its failure, such as leftover processes."""
    print(f"--- {name}", flush=True)
    mark = uuid.uuid4().hex
    interpreter = INTERPRETERS.get(name, sys.executable)
    command = [interpreter, "-m", f"benchmarks.{name}", "--json", str(path), *(["--quick"] if quick else [])]
    process = subprocess.run(command, cwd=ROOT, env={**os.environ, _MARK: mark}, check=False)
    leftovers = _leftovers(mark)
    for other in leftovers:
        other.kill()
    if process.returncode:
        return f"exit code {process.returncode}"
    if leftovers:
        return f"left {len(leftovers)} processes behind"
    return load_report(path)


def _leftovers(mark: str) -> list[psutil.Process]:
    """Wait up to three seconds for processes that a benchmark started, and return those that still run."""
    leftovers: list[psutil.Process] = []
    for _ in range(30):
        leftovers = [process for process in psutil.process_iter() if _is_marked(process, mark)]
        if not leftovers:
            break
        time.sleep(0.1)
    return leftovers


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except psutil.Error:
        return False


def _machine(load: tuple[float, float, float], minutes: float) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    packages = ("torch", "accelerate", "ipykernel", "jupyter_client", "ipywidgets", "numpy")
    rows = [
        ["date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")],
        ["commit", (commit.stdout.strip() or "unknown") + (", with changes" if changed.stdout.strip() else "")],
        ["processor", f"{_processor()}, {len(os.sched_getaffinity(0))} cores"],
        ["memory", f"{psutil.virtual_memory().total / 2**30:.0f} GiB"],
        ["system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"],
        ["packages", ", ".join(f"{name} {version(name)}" for name in packages)],
        ["load at the start", f"{load[0]:.1f} (1 minute), {load[1]:.1f} (5 minutes)"],
        ["took", f"{minutes:.1f} minutes"],
    ]
    return table(["", ""], rows) + "\n"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _summary(reports: list[Report]) -> str:
    rows = [[report.title, *figure.cells()] for report in reports for figure in report.figures]
    return table(["", "figure", "measured", "to reach", ""], rows) + "\n" if rows else ""


if __name__ == "__main__":
    sys.exit(min(run_all(), 1))
