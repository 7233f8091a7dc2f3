"""How much memory does an idle pool hold?

Private memory (USS) is freed if one process ends; PSS adds the process's part of shared memory. The peer are processes
as other launchers start them: fresh interpreters that import torch and open the same kind of group.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

import psutil

from benchmarks.measure import CELL_HELPERS, ROOT, Figure, Report, main, running_kernel

MB = 1e6
_SPAWNED = """
import sys
import torch
import torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
print("ready", flush=True)
sys.stdin.read()
"""


def idle_memory(quick: bool = False) -> Report:
    """Read the memory of idle workers, before and after cells, and of spawned processes."""
    report = Report("Idle memory", "Of processes that wait, MB.", ["", "processes", "USS each", "PSS each", "RSS each"])
    with running_kernel() as kernel:
        kernel.run(CELL_HELPERS + "\n%load_ext accel_nb\n_wait_warm()")
        kernel.run('_cell("--cpus 2", "pass")')
        pids = kernel.run("", "[*_session().status().pids.values()]")
        zygote = kernel.run("", "_session().status().zygote_pid")
        uss = _add(report, "worker after an empty cell", pids)
        _add(report, "zygote", [zygote])
        kernel.run('_cell("--cpus 2", "int()")')
        called = _add(report, "worker after a cell with a call", pids)
        kernel.run('_cell("--cpus 4", "pass")')
        _add(report, "worker of four", kernel.run("", "[*_session().status().pids.values()]"))
        text = (
            "import torch\\nnet = torch.nn.Linear(64, 64)\\nopt = torch.optim.Adam(net.parameters())\\n"
            "for _ in range(20):\\n    net(torch.randn(32, 64)).sum().backward(); opt.step(); opt.zero_grad()"
        )
        kernel.run(f'_cell("--cpus 2", "{text}")')
        _add(report, "worker after a small model was trained", kernel.run("", "[*_session().status().pids.values()]"))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        spawned = [
            subprocess.Popen(
                [sys.executable, "-c", _SPAWNED, str(rank), f"{folder}/store"],
                cwd=ROOT, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        try:
            for process in spawned:
                assert process.stdout is not None
                process.stdout.readline()
            peer = _add(report, "spawned process with torch and a group", [process.pid for process in spawned])
        finally:
            for process in spawned:
                process.kill()
                process.communicate()
    report.figures.append(Figure("private memory of an idle worker", uss, 10, "MB"))
    report.figures.append(Figure("private memory that the first call of a cell adds", called - uss, 2, "MB"))
    report.notes.append(f"A spawned process holds {peer / uss:.0f} x the private memory of a worker.")
    return report


def _add(report: Report, name: str, pids: list[int]) -> float:
    uses = [psutil.Process(pid).memory_full_info() for pid in pids]
    values = [statistics.median(getattr(use, kind) for use in uses) / MB for kind in ("uss", "pss", "rss")]
    report.add(name, len(pids), *[f"{value:.1f}" for value in values])
    return values[0]


if __name__ == "__main__":
    main(idle_memory)
