"""What do live telemetry and the panel cost a training step of about 20 ms?

One kernel, two workers. Cells of the same training loop run with the panel and the telemetry, and with both off, in a
random order inside of each round; a cell reports how long its own loop took, and what its worker and the kernel
computed meanwhile. On a shared machine the time of a loop varies by more than one percent, processor time does not. The
loss is therefore computed from processor time too: the worker's, plus the kernel's divided by the number of processors.
"""

from __future__ import annotations

import os
import statistics

from benchmarks.measure import CELL_HELPERS, Figure, Report, main, median_interval, running_kernel, shuffled_rounds

ON, OFF = "panel and telemetry on", "both off"
_SETUP = """
import os
import torch
from torch import nn
_TEXT = '''
import pathlib, time, torch
from torch import nn
from accel_nb import Accelerator
from accel_nb.telemetry.events import NullEventSink, current_sink
size = {size}
if "trained" not in globals():
    torch.manual_seed(0)
    trained, data = {{}}, torch.randn(128, size)
key = {on}
if key not in trained:
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    own = Accelerator(sink=None if key else NullEventSink())
    own.prepare(model, optimizer)
    trained[key] = own, model, optimizer
own, model, optimizer = trained[key]
def train(steps):
    for _ in range(steps):
        own.backward(model(data).square().mean())
        optimizer.step()
        optimizer.zero_grad()
def kernel_cpu():
    tasks = pathlib.Path("/proc/{kernel}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
train(2)
own.wait_for_everyone()
before = [time.perf_counter(), time.process_time(), kernel_cpu()]
train({steps})
own.wait_for_everyone()
loop = [now - then for now, then in zip([time.perf_counter(), time.process_time(), kernel_cpu()], before)]
del model, optimizer, own, train, kernel_cpu, pathlib
'''
def _train(on, size, steps):
    text = _TEXT.format(on=on, size=size, steps=steps, kernel=os.getpid())
    _cell("--cpus 2" if on else "--cpus 2 --no-panel", text)
    return loop
"""


def panel_cost(quick: bool = False) -> Report:
    """Train with panel and telemetry on and off in turn."""
    rounds, steps = (4, 50) if quick else (24, 100)
    with running_kernel() as kernel:
        kernel.run(CELL_HELPERS + "\n%load_ext accel_nb\n_wait_warm()")
        kernel.run(_SETUP)
        size, took = 384, 0.0
        for _ in range(4):
            took = kernel.run(f"_took = _train(False, {size}, 20)", "_took")[0] / 20
            if 0.017 < took < 0.023:
                break
            size = max(64, int(size * min(2.0, max(0.5, (0.02 / took) ** 0.45))) // 16 * 16)
            kernel.run('_cell("--cpus 2", "del trained, data")')
        for on in (True, False):
            kernel.run(f"_train({on}, {size}, {steps})")
        times: dict[str, list[list[float]]] = {ON: [], OFF: []}
        for order in shuffled_rounds([ON, OFF], rounds):
            for name in order:
                times[name].append(kernel.run(f"_took = _train({name == ON}, {size}, {steps})", "_took"))
    report = Report(
        "Panel cost",
        f"Training steps of about 20 ms on 2 workers ({rounds} rounds of {steps} steps each way; medians).",
        ["", "ms/step", "steps/s", "worker CPU ms/step", "kernel CPU ms/step"],
    )
    for name, values in times.items():
        wall, cpu, kernel_cpu = (statistics.median(value[i] for value in values) / steps * 1000 for i in range(3))
        report.add(name, f"{wall:.2f}", 1000 / wall, f"{cpu:.2f}", f"{kernel_cpu:.3f}")
    pairs = list(zip(times[ON], times[OFF], strict=True))
    changes = [(on[0] / off[0] - 1) * 100 for on, off in pairs]
    worker, own = ([(on[i] - off[i]) / steps * 1e6 for on, off in pairs] for i in (1, 2))
    step_us = statistics.median(off[0] for off in times[OFF]) / steps * 1e6
    lost = [(mine + theirs / (os.cpu_count() or 1)) / step_us * 100 for mine, theirs in zip(worker, own, strict=True)]
    report.figures += [
        Figure("step time, on against off", statistics.median(changes), 0.5, "%", spread=median_interval(changes)),
        Figure("processor time that a step loses", statistics.median(lost), 0.5, "%", spread=median_interval(lost)),
    ]
    report.notes.append(
        f"Extra processor time per step: {statistics.median(worker):.0f} us in the worker, "
        f"{statistics.median(own):.0f} us in the kernel."
    )
    return report


if __name__ == "__main__":
    main(panel_cost)
