"""What does it cost to launch a script that does nothing?

Two ranks on the CPU, by our launcher, by ``torchrun`` and by ``accelerate launch``, in a random order in each round.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import ROOT, Figure, Report, main, median_interval, quantile, shuffled_rounds

OWN, TORCHRUN, PEER = "accel-nb launch", "torchrun", "accelerate launch"
_COMMANDS = {
    OWN: ["accel_nb.cli", "launch", "--cpus", "2"],
    TORCHRUN: ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"],
    PEER: ["accelerate.commands.launch", "--num_processes", "2", "--multi_gpu", "--main_process_port", "0"],
}
"""accelerate starts several ranks only with ``--multi_gpu``; an empty script needs no GPU."""


def launch(quick: bool = False) -> Report:
    """Time the three launchers in turn."""
    rounds = 3 if quick else 10
    times: dict[str, list[float]] = {name: [] for name in _COMMANDS}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        script = Path(folder) / "empty.py"
        script.write_text("")
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": folder, "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        for name in _COMMANDS:  # once each for the caches
            _time(name, script, environment)
        for order in shuffled_rounds(list(_COMMANDS), rounds):
            for name in order:
                times[name].append(_time(name, script, environment))
    report = Report(
        "Launch of an empty script",
        "Two ranks on the CPU, from the command to its end.",
        ["", "n", "median ms", "p90 ms"],
    )
    for name, values in times.items():
        report.add(name, len(values), *[f"{quantile(values, share) * 1000:.0f}" for share in (0.5, 0.9)])
    for name, limit in ((PEER, 0.6), (TORCHRUN, 0.9)):
        ratios = [own / other for own, other in zip(times[OWN], times[name], strict=True)]
        report.figures.append(
            Figure(f"ours / {name}", statistics.median(ratios), limit, "x", spread=median_interval(ratios))
        )
    return report


def _time(name: str, script: Path, environment: dict[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", *_COMMANDS[name], str(script)],
        cwd=script.parent, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - started


if __name__ == "__main__":
    main(launch)
