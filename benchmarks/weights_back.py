"""How fast do 500 MB of trained weights come back into the kernel?

A real kernel runs a cell that changes a module of 500 MB in place on the workers; the time counts from the end of the
cell's own work until the magic returns, when the kernel's parameters hold the new values. The peers do the same from
a process that already holds the module: `torch.save` through a pipe, and through a file.
"""

from __future__ import annotations

import statistics

from benchmarks.measure import CELL_HELPERS, Figure, Report, main, running_kernel, shuffled_rounds

OURS, PIPE, FILE = "accel_nb, the cell's own return", "torch.save through a pipe", "torch.save through a file"
GB = 0.5

_MODEL = """
import torch
class Big(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2500, 5000)) for _ in range(10)])
"""
_CHILD = """
import io, os, sys, time
from multiprocessing.connection import Connection
import torch
{model}
connection, model = Connection(int(sys.argv[1])), Big()
while True:
    try:
        how = connection.recv_bytes().decode()
    except EOFError:
        break
    with torch.no_grad():
        for part in model.parts:
            part.add_(1)
    done_at = time.monotonic()
    target = io.BytesIO() if how == "pipe" else how
    torch.save(model.state_dict(), target)
    connection.send_bytes(b"%.9f" % done_at)
    if how == "pipe":
        connection.send_bytes(target.getbuffer())
"""
_SETUP = """
import io, os, subprocess, sys, tempfile
from multiprocessing.connection import Pipe
{model}
model, other = Big(), Big()
_folder = tempfile.TemporaryDirectory(prefix="benchmark-")
_path = _folder.name + "/weights.pt"
_ours, _theirs = Pipe()
_child = subprocess.Popen([sys.executable, "-c", {child!r}, str(_theirs.fileno())], pass_fds=[_theirs.fileno()])
_theirs.close()
def _check(module, count):
    assert all(part[0, 0] == count == part[-1, -1] for part in module.parts), (count, module.parts[0][0, 0])
def _peer(how):
    _ours.send_bytes(how.encode())
    done_at = float(_ours.recv_bytes())
    source = io.BytesIO(_ours.recv_bytes()) if how == "pipe" else how
    other.load_state_dict(torch.load(source, weights_only=True))
    return time.monotonic() - done_at
_CELL = '''
import time, torch
with torch.no_grad():
    for part in model.parts:
        part.add_(1)
accelerator.wait_for_everyone()
done_at = time.monotonic()
'''
def _own():
    _ip.run_cell_magic("accelerate", "--cpus 2", _CELL)
    return time.monotonic() - done_at
"""
_CALLS = {OURS: "_own()", PIPE: "_peer('pipe')", FILE: "_peer(_path)"}


def weights_back(quick: bool = False) -> Report:
    """Send 500 MB back in each way, in turn; the first rounds warm up."""
    rounds, per_round = (2, 3) if quick else (4, 5)
    with running_kernel() as kernel:
        kernel.run(CELL_HELPERS + "\n%load_ext accel_nb\n_wait_warm()")
        kernel.run(_SETUP.format(model=_MODEL, child=_CHILD.format(model=_MODEL)))
        try:
            first = kernel.run("_took = _own()", "_took")
            kernel.run("_own()")
            kernel.run("_peer('pipe'), _peer(_path)")
            counts = {OURS: 2, "peers": 2}
            times: dict[str, list[float]] = {name: [] for name in _CALLS}
            for order in shuffled_rounds(list(_CALLS), rounds):
                for name in order:
                    for _ in range(per_round if name == OURS else 1):
                        times[name].append(kernel.run(f"_took = {_CALLS[name]}", "_took"))
                        counts[OURS if name == OURS else "peers"] += 1
            kernel.run(f"_check(model, {counts[OURS]}); _check(other, {counts['peers']})")
        finally:
            kernel.run("_ours.close(); _child.wait(timeout=10); _folder.cleanup()")
    report = Report(
        "Weights back",
        "500 MB of weights changed on the workers, until the kernel's own parameters hold them.",
        ["", "n", "median s", "GB/s"],
    )
    for name, values in times.items():
        report.add(name, len(values), f"{statistics.median(values):.3f}", GB / statistics.median(values))
    report.add("accel_nb, the first time", 1, f"{first:.3f}", GB / first)
    speed = GB / statistics.median(times[OURS])
    report.figures.append(Figure("weights back once warm", speed, 1.5, "GB/s", "at least"))
    for name in (PIPE, FILE):
        report.notes.append(
            f"{name} takes {statistics.median(times[name]) / statistics.median(times[OURS]):.1f} x as long."
        )
    report.notes.append("The values of both copies in the kernel were checked at the end.")
    return report


if __name__ == "__main__":
    main(weights_back)
