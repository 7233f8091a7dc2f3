"""Runs cases in a kernel: each as in a notebook that was just opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
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
torch.set_default_dtype(torch.{dtype})
torch.set_grad_enabled(True)
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


@dataclass(frozen=True)
class Setting:
    """What all cases of a test run have in common; ``REALWORLD_FLAGS``, ``_YARDSTICK`` and ``_DTYPE`` choose another.

    Args:
        flags: Flags of every marked cell, before its own.
        yardstick: Flags of the run that the workers' run is compared with; None: without the magic.
        dtype: torch's default dtype.
    """

    flags: str = ""
    yardstick: str | None = None
    dtype: str = "float64"

    @property
    def is_declared(self) -> bool:
        """Whether the outcomes that cases declare hold; in another setting each must be equal, told or refused."""
        return self == Setting()

    @property
    def tolerance(self) -> float:
        """The largest difference of two equal values."""
        return 1e-6 if self.dtype == "float64" else 1e-3


def read_setting() -> Setting:
    """Return the setting that the environment variables choose."""
    return Setting(
        flags=os.environ.get("REALWORLD_FLAGS", ""),
        yardstick=os.environ.get("REALWORLD_YARDSTICK"),
        dtype=os.environ.get("REALWORLD_DTYPE", "float64"),
    )


class Notebook:
    """A kernel that runs one case after another; the plain run of each is kept."""

    def __init__(self, kernel: Kernel, folder: Path, setting: Setting) -> None:
        self._kernel = kernel
        self._folder = folder
        self._setting = setting
        self._plain: dict[str, Run] = {}
        self._num_runs = 0
        self._own(_FIRST)

    def plain(self, case: Case) -> Run:
        """Return the run that the others are compared with."""
        if case.name not in self._plain:
            yardstick = self._setting.yardstick
            self._plain[case.name] = self._run(case, None if yardstick is None else f"--cpus 1 {yardstick}")
        return self._plain[case.name]

    def on_workers(self, case: Case, workers: int) -> Run:
        """Run a case with its marked cells on so many workers, which are started for it."""
        return self._run(case, f"--cpus {workers} {self._setting.flags}")

    def _run(self, case: Case, flags: str | None) -> Run:
        self._num_runs += 1
        folder = self._folder / str(self._num_runs)
        if flags is not None:
            self._own("%%accelerate --cpus 1\npass")  # another number of workers: those of the case before are ended
        self._own(_FRESH.format(folder=str(folder), dtype=self._setting.dtype))
        run = Run()
        for cell in case.cells:
            source = cell.source
            if flags is not None and cell.flags is not None:
                source = f"%%accelerate {flags} --no-panel --timeout {CELL_S} {cell.flags}\n{source}"
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
