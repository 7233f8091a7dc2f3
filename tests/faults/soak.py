"""Very many cells in one notebook: ``python -m tests.faults.soak``, with ``--cells N``, 10,000 by default.

Each cell sends something, trains a step, prints, and brings something back. Printed at the end, as JSON: by how much
memory and open files of the kernel have grown since the first tenth, and by how much a cell has become slower. IPython
keeps each cell's text in several places; by how much a notebook grows that runs the same cells without the extension is
measured too, over a tenth of the cells.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import psutil

from tests.support.kernel import Kernel, running_kernel

SETUP = """
%load_ext accel_nb
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
"""
CELL = """%%accelerate --cpus 2 --no-panel
x = torch.full((4, 8), {number} % 7 / 7)
loss = model(x).pow(2).mean()
loss.backward()
optimizer.step()
optimizer.zero_grad()
history = [{number}, loss.item()]
print({number})
"""

COUNT = """%%accelerate --cpus 2 --no-panel --show-ranks all
print(len(__import__("os").listdir("/proc/self/fd")))
"""


@dataclass(frozen=True)
class Growth:
    """What cells left behind in the kernel and on its workers, and how their time drifted."""

    num_cells: int
    kernel_bytes: int
    worker_bytes: int
    descriptors: int
    worker_descriptors: int
    median_s: float
    drift: float


def _open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def soak(kernel: Kernel, num_cells: int) -> Growth:
    """Run so many cells; the first tenth, at least ten, warms everything up and is not counted."""
    output = kernel.run(SETUP)
    assert output.error is None, output.traceback
    warm, times = max(10, num_cells // 10), []
    here = psutil.Process(kernel.pid)
    start, workers, opened = (0, 0), 0, 0
    for number in range(warm + num_cells):
        if number == warm:
            opened = _opened_by_workers(kernel)
            start, workers = _size([here]), _resident_bytes(_workers(here))
        begun = time.monotonic()
        output = kernel.run(CELL.format(number=number))
        times.append(time.monotonic() - begun)
        assert output.error is None, output.traceback
        assert output.stdout == f"{number}\n", output.stdout
    assert kernel.value("history[0]") == warm + num_cells - 1
    opened_end = _opened_by_workers(kernel)
    end, workers_end = _size([here]), _resident_bytes(_workers(here))
    times = times[warm:]
    fifth = max(1, num_cells // 5)
    return Growth(
        num_cells,
        end[0] - start[0],
        workers_end - workers,
        end[1] - start[1],
        opened_end - opened,
        round(statistics.median(times), 4),
        round(statistics.median(times[-fifth:]) / statistics.median(times[:fifth]) - 1, 3),
    )


def growth_without_extension(num_cells: int) -> float:
    """Return by how many bytes a cell a kernel grows that trains by itself."""
    setup, cell = SETUP.replace("%load_ext accel_nb", ""), CELL.replace("%%accelerate", "# accelerate")
    with running_kernel() as kernel:
        assert kernel.run(setup).error is None
        here, warm, start = psutil.Process(kernel.pid), num_cells // 4, 0
        for number in range(warm + num_cells):
            if number == warm:
                start = here.memory_info().rss
            output = kernel.run(cell.format(number=number))
            assert output.error is None, output.traceback
        return (here.memory_info().rss - start) / num_cells


def _workers(kernel: psutil.Process) -> list[psutil.Process]:
    return [worker for zygote in kernel.children() for worker in zygote.children()]


def _size(processes: list[psutil.Process]) -> tuple[int, int]:
    """Return resident bytes and open files of some processes."""
    return _resident_bytes(processes), sum(_open_files(p.pid) for p in processes)


def _resident_bytes(processes: list[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes)


def _opened_by_workers(kernel: Kernel) -> int:
    """Return how many files the workers have open while they run a cell.

    From outside the count depends on the scheduler: a worker closes what went along with its answer once that is sent,
    and the kernel may have taken the answer by then.
    """
    output = kernel.run(COUNT)
    assert output.error is None, output.traceback
    return sum(int(line.rpartition(" ")[2]) for line in output.stdout.splitlines())


def main() -> None:
    """Run the cells and print what came out; the exit status is 1 if it is not what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=10_000)
    num_cells = parser.parse_args().cells
    without = round(growth_without_extension(max(100, num_cells // 10)) * num_cells)
    with running_kernel() as kernel:
        growth = soak(kernel, num_cells)
    print(json.dumps({**asdict(growth), "kernel_bytes_without_extension": without}))
    has_leaked = growth.descriptors > 2 or growth.worker_descriptors > 0
    is_clean = growth.kernel_bytes - without <= 20_000_000 and not has_leaked
    sys.exit(0 if is_clean else 1)


if __name__ == "__main__":
    main()
