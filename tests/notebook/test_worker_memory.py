"""Workers share the memory of the process that they are forked from, except for what a cell uses."""

from __future__ import annotations

from tests.support.kernel import Kernel

OWN_KERNEL = True
MAX_ADDED_MB = 5
"""Reading each imported module once costs three times as much."""

_READ_USES = """
import psutil
children = psutil.Process().children(recursive=True)
parents = {child.ppid() for child in children}
uses = {child.pid: child.memory_full_info().uss / 1e6 for child in children if child.pid not in parents}
"""


def test_first_call_of_a_cell_copies_little_memory(kernel: Kernel):
    before = _uses_after(kernel, "pass")
    after = _uses_after(kernel, "int()")
    assert len(before) == 2
    assert before.keys() == after.keys()
    assert all(after[pid] - before[pid] < MAX_ADDED_MB for pid in before)


def _uses_after(kernel: Kernel, cell: str) -> dict[int, float]:
    """Run a cell on two workers, and return the private memory of each in MB by its process id."""
    for code in (f"%%accelerate --cpus 2\n{cell}", _READ_USES):
        output = kernel.run(code)
        assert output.error is None, output.traceback
    return kernel.value("uses")
