"""Runs a session in two kernels, one without the extension, and compares them after each cell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from tests.properties.sessions.session import SessionCell
from tests.realworld.values import Entries, differences
from tests.realworld.verdict import Run, is_refusal, lines_of_ours, remarks
from tests.support.kernel import Kernel, Output, running_kernel

FLAGS = "--cpus 2 --no-panel --timeout 30"
TOLERANCE = 1e-9
_ROOT = Path(__file__).parents[3]
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SETUP = """
%matplotlib inline
import sys
sys.path.append({root!r})
from pathlib import Path as _Path
import gc, matplotlib.pyplot, numpy, torch
from tests.properties.sessions.dump import Recorder as _Recorder
gc.collect()
gc.freeze()  # %reset collects garbage, which would look through all that was imported
numpy.ones(1) + 1
sys._recorder = _Recorder(get_ipython(), _Path({target!r}))
sys.path.remove({root!r})
"""
_FRESH = """
%reset -f
import logging, os, random, sys, warnings
sys._recorder.folder = None
import numpy, torch
os.makedirs({folder!r}, exist_ok=True)
os.chdir({folder!r})
warnings.resetwarnings()
warnings.simplefilter('default')
torch.set_default_dtype(torch.float32)
torch.set_grad_enabled(True)
torch.use_deterministic_algorithms(False)
torch.set_num_threads(1)
numpy.seterr(all='warn')
numpy.set_printoptions(precision=8)
sys.setrecursionlimit(3000)
sys.path[:] = [path for path in sys.path if '/ses_' not in path]
if 'pandas' in sys.modules: sys.modules['pandas'].reset_option('display.max_rows')
logging.getLogger().setLevel(logging.WARNING)
for name in [name for name in os.environ if name.startswith('SES_')]: del os.environ[name]
for name in [name for name in logging.root.manager.loggerDict if name.startswith('ses')]:
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(0)
random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
sys._recorder.begin({folder!r})
for name in set(globals()) - {{'In', 'Out', 'get_ipython', 'exit', 'quit', 'open', 'name'}}:
    if not name.startswith('_'): del globals()[name]
del name
import gc as _gc
_gc.collect(), _gc.freeze()
del _gc
"""
_CLEAR = """
for _name in set(globals()) - {'In', 'Out', 'get_ipython', 'exit', 'quit', 'open'}:
    if not _name.startswith('_'): del globals()[_name]
"""
"""What an earlier session has left only on the workers is deleted there."""
Kind = Literal["equal", "told", "refused", "failed", "silent"]


@dataclass(frozen=True)
class Finding:
    """What differs after one cell, and what accel_nb has said in it."""

    kind: Kind
    place: int
    reasons: tuple[str, ...]
    said: tuple[str, ...]


class Notebooks:
    """Two kernels that run the same sessions."""

    def __init__(self, plain: Kernel, other: Kernel, folder: Path) -> None:
        self._kernels = {"plain": plain, "other": other}
        self._folder = folder
        self._num_runs = 0
        for name, kernel in self._kernels.items():
            (folder / name).mkdir()
            self._own(kernel, _SETUP.format(root=str(_ROOT), target=str(folder / name)))
        self._own(other, "%load_ext accel_nb")

    def judge(self, cells: Sequence[SessionCell]) -> Iterator[Finding]:
        """Run the cells, and yield what became of each on workers, until values differ."""
        self._num_runs += 1
        other, plain = self._kernels["other"], self._kernels["plain"]
        for name, kernel in self._kernels.items():
            self._own(kernel, _FRESH.format(folder=str(self._folder / f"{name}-{self._num_runs}")))
        self._own(other, f"%%accelerate {FLAGS}\n{_CLEAR}")
        before: Entries = self._entries("plain")
        self._entries("other")
        said: list[str] = []
        for place, cell in enumerate(cells):
            output = other.run(cell.on_workers(FLAGS), timeout_s=200)
            found = self._entries("other")
            if cell.is_accelerated and output.error is not None and is_refusal(output):
                reasons = differences(before, found, TOLERANCE)
                yield Finding("failed" if reasons else "refused", place, (": ".join(output.error), *reasons), ())
                if reasons:
                    return
                continue
            expected = plain.run(cell.source, timeout_s=200)
            before = self._entries("plain")
            lines = remarks(lines_of_ours(Run(outputs=[expected]), Run(outputs=[output])))
            said += lines
            reasons = [*differences(before, found, TOLERANCE), *_different_outputs(cell, expected, output)]
            if reasons:
                is_failed = output.error is not None and output.error != expected.error
                kind: Kind = "told" if said else "failed" if is_failed else "silent"
                yield Finding(kind, place, tuple(reasons), tuple(said))
                return
            if cell.is_accelerated:
                yield Finding("equal", place, (), tuple(lines))

    def _entries(self, name: str) -> Entries:
        path = self._folder / name / "entries.json"
        found = json.loads(path.read_text())
        assert "(dump)" not in found, found["(dump)"]
        path.unlink()
        return found

    def _own(self, kernel: Kernel, source: str) -> Output:
        output = kernel.run(source)
        assert output.error is None, output.traceback
        return output


def _different_outputs(cell: SessionCell, plain: Output, other: Output) -> Iterator[str]:
    # Of an error in a captured cell a kernel shows the traceback, and the workers print it; not of an interrupt.
    is_captured = "%%capture" in cell.source and other.error is None and plain.error is not None
    if is_captured and (plain.error[0] in other.stderr or plain.error[0] == "KeyboardInterrupt"):
        pass
    elif _without_addresses(plain.error) != _without_addresses(other.error):
        yield f"error: {plain.error} plainly, {other.error} on workers {other.traceback[-1500:]}"
    if "time" in cell.source and "%" in cell.source:
        return
    if _without_addresses(plain.stdout) != _without_addresses(other.stdout):
        yield f"output: {plain.stdout!r:.300} plainly, {other.stdout!r:.300} on workers"


def _without_addresses(value: object) -> str:
    return _ADDRESS.sub("0x", str(value))


@contextmanager
def running_notebooks() -> Iterator[Notebooks]:
    """Yield two kernels, and end them afterwards."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="accel_nb_sessions_"))
        yield Notebooks(stack.enter_context(running_kernel()), stack.enter_context(running_kernel()), Path(folder))
