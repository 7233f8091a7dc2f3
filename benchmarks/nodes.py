"""What do cells on the nodes of a Ray cluster cost, beside what Ray itself costs?

The nodes are simulated on this machine, so data travels over loopback. The kernel's node has processors in one
cluster; in the other it has none, so that rank 0 is far. Needs the packages of `make test-engines`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.measure import (
    CELL_HELPERS,
    ROOT,
    Figure,
    Kernel,
    Report,
    main,
    median_interval,
    running_kernel,
    shuffled_rounds,
)

TOKEN = "0123456789abcdef0123456789abcdef"
STORE_MB = 2500
WEIGHTS_MB, DATA_MB = 500, 1000

_PLAIN = """
import os, psutil, ray, torch
import numpy as np
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
class Plain:
    def __init__(self, size=0):
        self.array = np.ones(size, np.uint8)
    def nothing(self):
        pass
    def large(self):
        return self.array
def _plain(address, size=0):
    node, = (node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == address and node["Alive"])
    placed = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(Plain).options(num_cpus=0, scheduling_strategy=placed).remote(size)
"""
_HOSTS = """
import time
from accel_nb.config.engine_section import EngineOptions
from accel_nb.notebook.session.engines import start_engine
def _our_hosts():
    options = EngineOptions(kind="ray", nodes=2)
    started = time.perf_counter()
    engine = start_engine(options, {})
    took = time.perf_counter() - started
    engine.stop()
    return took
def _plain_actors():
    started = time.perf_counter()
    actors = [_plain(address) for address in ("127.0.0.2", "127.0.0.3")]
    ray.get([actor.nothing.remote() for actor in actors])
    took = time.perf_counter() - started
    for actor in actors:
        ray.kill(actor)
    return took
"""
_WEIGHTS = f"""
class Big(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2500, 5000)) for _ in range(10)])
model, target = Big(), np.empty({WEIGHTS_MB} * 1_000_000, np.uint8)
_CELL = '''
import time, torch
with torch.no_grad():
    for part in model.parts:
        part.add_(1)
accelerator.wait_for_everyone()
done_at = time.monotonic()
'''
def _own(flags):
    _ip.run_cell_magic("accelerate", flags, _CELL)
    return time.monotonic() - done_at
def _raw():
    started = time.monotonic()
    np.copyto(target, ray.get(_large.large.remote()))
    return time.monotonic() - started
def _peak_growth(call):
    open("/proc/self/clear_refs", "w").write("5")
    before = psutil.Process().memory_info().rss
    call()
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return (peak - before) / ({WEIGHTS_MB} * 1e6)
"""
_DATA = f"""
import contextlib, glob
data = torch.ones({DATA_MB} * 250_000)
def _copied_mb():
    sizes = dict()
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("/memfd:accel_nb_payload"):
                status = os.stat(path)
                sizes[status.st_ino] = status.st_blocks * 512 / 1e6
    return sum(sizes.values())
def _sent_mb():
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent / 1e6
_READ = '''
total = float(data[::4096].sum())
accelerator.wait_for_everyone()
copied_mb = _copied_mb()
accelerator.wait_for_everyone()
'''
"""


def nodes(quick: bool = False) -> Report:
    """Compare with Ray's own calls, transfers and actors."""
    report = Report(
        "Cells on several nodes",
        "Two nodes of a Ray cluster, simulated on this machine, beside Ray's own calls, actors and transfers.",
        ["", "n", "median ms"],
    )
    with running_cluster() as address:
        _warm_cells(report, f"--engine ray --nodes 2 --cpus 1 --engine.address {address}", quick)
        _hosts(report, address, quick)
        _weights(report, f"--engine ray --nodes 2 --cpus 1 --engine.address {address}", "127.0.0.2", "near", quick)
        _ranks_and_data(report, f"--engine ray --nodes 2 --engine.address {address}")
    with running_cluster("--kernel-has-none") as address:
        _weights(report, f"--engine ray --nodes 2 --cpus 1 --engine.address {address}", "127.0.0.3", "far", quick)
    return report


@contextmanager
def running_cluster(*options: str) -> Iterator[str]:
    """Run a cluster of simulated nodes with a token, and yield its address."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    command = [sys.executable, "-m", "tests.engines.cluster", "--store-mb", str(STORE_MB), *options]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            if not address:
                raise RuntimeError("the cluster did not start")
            yield address
        finally:
            process.stdin.close()


@contextmanager
def loaded_kernel(flags: str = "") -> Iterator[Kernel]:
    """Run a kernel that has loaded the extension; with flags, it has run three cells."""
    with running_kernel() as kernel:
        kernel.run(CELL_HELPERS + "\n%load_ext accel_nb")
        for _ in range(3 if flags else 0):
            kernel.run(f"_cell({flags!r}, 'pass')")
        yield kernel


def _warm_cells(report: Report, flags: str, quick: bool) -> None:
    rounds, per_round = (4, 5) if quick else (12, 10)
    with loaded_kernel("--cpus 2") as local, loaded_kernel(flags) as remote:
        remote.run(_PLAIN)
        remote.run("_actor = _plain('127.0.0.3')\nray.get(_actor.nothing.remote())")
        empty = "started = time.perf_counter()\nray.get(_actor.nothing.remote())\n_took = time.perf_counter() - started"
        calls = {
            "empty cell, two workers of this machine": (local, "_took = _cell('--cpus 2', 'pass')"),
            "empty cell, a worker on each of two nodes": (remote, f"_took = _cell({flags!r}, 'pass')"),
            "empty call of an actor": (remote, empty),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        ratios: list[float] = []
        for order in shuffled_rounds(list(calls), rounds):
            for name in order:
                kernel, code = calls[name]
                times[name] += [float(kernel.run(code, "_took")) for _ in range(per_round)]
            near, far, call = (statistics.median(values[-per_round:]) for values in times.values())
            ratios.append((far - near) / call)
    for name, values in times.items():
        report.add(name, len(values), f"{statistics.median(values) * 1000:.2f}")
    report.figures.append(
        Figure(
            "empty cell on nodes, less one on this machine, in empty actor calls",
            statistics.median(ratios), 3, "x", spread=median_interval(ratios),
        )
    )  # fmt: skip


def _hosts(report: Report, address: str, quick: bool) -> None:
    rounds = 3 if quick else 8
    with running_kernel() as kernel:
        kernel.run(
            f"import logging, ray\nray.init(address={address!r}, log_to_driver=False, logging_level=logging.ERROR)"
        )
        kernel.run(_PLAIN + _HOSTS)
        calls = {"two hosts of ours, until they accept frames": "_our_hosts()", "two plain actors": "_plain_actors()"}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for code in calls.values():
            kernel.run(code)
        for order in shuffled_rounds(list(calls), rounds):
            for name in order:
                times[name].append(float(kernel.run(f"_took = {calls[name]}", "_took")))
    for name, values in times.items():
        report.add(name, len(values), f"{statistics.median(values) * 1000:.0f}")
    ours, plain = times.values()
    differences = [own - base for own, base in zip(ours, plain, strict=True)]
    report.figures.append(
        Figure(
            "two hosts, less two plain actors", statistics.median(differences), 1, "s",
            spread=median_interval(differences),
        )
    )  # fmt: skip


def _weights(report: Report, flags: str, address: str, where: str, quick: bool) -> None:
    rounds = 4 if quick else 10
    with loaded_kernel(flags) as kernel:
        kernel.run(_PLAIN + _WEIGHTS)
        kernel.run(f"_large = _plain({address!r}, {WEIGHTS_MB} * 1_000_000)\nray.get(_large.nothing.remote())")
        own = f"_own({flags!r})"
        kernel.run(f"{own}; {own}; _raw(); _raw()")
        names = f"{WEIGHTS_MB} MB of weights back, rank 0 {where}", f"the same by Ray and one copy, {where}"
        calls = dict(zip(names, (own, "_raw()"), strict=True))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for order in shuffled_rounds(list(calls), rounds):
            for name in order:
                times[name].append(float(kernel.run(f"_took = {calls[name]}", "_took")))
        growth = float(kernel.run(f"_grown = _peak_growth(lambda: {own})", "_grown"))
        kernel.run(f"assert all(part[0, 0] == {rounds + 3} == part[-1, -1] for part in model.parts)")
    for name, values in times.items():
        report.add(name, len(values), f"{statistics.median(values) * 1000:.0f}")
    ours, raw = times.values()
    ratios = [base / own for own, base in zip(ours, raw, strict=True)]
    report.figures += [
        Figure(
            f"speed of weights back, {where}, over Ray's transfer and one copy",
            statistics.median(ratios), 0.8, "x", "at least", spread=median_interval(ratios),
        ),
        Figure(f"memory of the kernel while weights come back, {where}, over their size", growth, 1.1, "x"),
    ]  # fmt: skip


def _ranks_and_data(report: Report, flags: str) -> None:
    with loaded_kernel(f"{flags} --cpus 2") as kernel:
        kernel.run(_PLAIN)
        pids = "_session().status().pids"
        sizes = f"{{rank: psutil.Process(pid).memory_full_info().uss / 1e6 for rank, pid in {pids}.items()}}"
        uss = {int(rank): size for rank, size in kernel.run("pass", sizes).items()}
    with loaded_kernel() as kernel:
        kernel.run(_PLAIN + _DATA)
        kernel.run(f"_cell({flags + ' --cpus 4'!r}, 'pass')")
        kernel.run("_sent = _sent_mb()")
        kernel.run(f"_took = _cell({flags + ' --cpus 4'!r}, _READ)")
        sent, copied, took = kernel.run("pass", "[_sent_mb() - _sent, copied_mb, _took]")
        kernel.run("assert total == len(data[::4096])")
    report.add(f"{DATA_MB} MB of data to 2 x 4 ranks", 1, f"{took * 1000:.0f}")
    report.figures += [
        Figure("memory (USS) of the second rank of a node", max(uss[1], uss[3]), 10, "MB"),
        Figure("data sent to the other node, over its size", sent / DATA_MB, 1.1, "x"),
        Figure("copies of it while eight ranks read it, over one for each node", copied / DATA_MB / 2, 1.1, "x"),
    ]


if __name__ == "__main__":
    main(nodes)
