"""Runs cases in a kernel: each as in a notebook that was just opened."""

from __future__ import annotations

from pathlib import Path

from tests.realworld.case import Case
from tests.realworld.values import read_values
from tests.realworld.verdict import Run
from tests.support.kernel import Kernel, Output

_ROOT = Path(__file__).parents[2]
_FIRST = """
%matplotlib inline
import gc, matplotlib.pyplot, numpy, torch
gc.collect()
gc.freeze()  # %reset collects garbage, which would look through all that was imported
"""
_FRESH = """
%reset -f
import os, random, sys, warnings
import numpy, torch
os.makedirs({folder!r}, exist_ok=True)
os.chdir({folder!r})
warnings.resetwarnings()
warnings.simplefilter('default')
torch.set_default_dtype(torch.float64)
random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
del os, random, sys, warnings, numpy, torch
"""
_WRITE = """
import sys
sys.path.append({root!r})
from tests.realworld.values import write_values
sys.path.remove({root!r})
write_values({names!r}, globals(), {path!r})
"""
CELL_S = 40
"""How long one cell may run."""


class Notebook:
    """A kernel that runs one case after another; the plain run of each is kept."""

    def __init__(self, kernel: Kernel, folder: Path) -> None:
        self._kernel = kernel
        self._folder = folder
        self._plain: dict[str, Run] = {}
        self._num_runs = 0
        self._own(_FIRST)

    def plain(self, case: Case) -> Run:
        """Return the plain run of a case; it must work."""
        if case.name not in self._plain:
            run = self._run(case, None)
            assert run.failed is None, f"{case.name} fails plainly:\n{run.failed.traceback}"
            self._plain[case.name] = run
        return self._plain[case.name]

    def on_workers(self, case: Case, workers: int) -> Run:
        """Run a case with its marked cells on so many workers, which are started for it."""
        return self._run(case, workers)

    def _run(self, case: Case, workers: int | None) -> Run:
        self._num_runs += 1
        folder = self._folder / str(self._num_runs)
        if workers is not None:
            self._own("%%accelerate --cpus 1\npass")  # another number of workers: those of the case before are ended
        self._own(_FRESH.format(folder=str(folder)))
        run = Run()
        for cell in case.cells:
            source = cell.source
            if workers is not None and cell.flags is not None:
                source = f"%%accelerate --cpus {workers} --no-panel --timeout {CELL_S} {cell.flags}\n{source}"
            run.outputs.append(self._kernel.run(source, timeout_s=2 * CELL_S))
            if run.failed is not None:
                return run
        run.values, run.shares = (self._read(names, folder) for names in (case.compare, case.share))
        return run

    def _read(self, names: tuple[str, ...], folder: Path) -> dict:
        path = folder / "values.json"
        self._own(_WRITE.format(root=str(_ROOT), names=names, path=str(path)))
        return read_values(path)

    def _own(self, source: str) -> Output:
        """Run a cell of this runner's own, which must work."""
        output = self._kernel.run(source)
        assert output.error is None, output.traceback
        return output
