"""Workers that run one program after another, each as a plain ``%%accelerate`` cell of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accel_nb.config import parse_flags, resolve
from accel_nb.config.engine_section import EngineOptions
from accel_nb.notebook.cells.cell_analysis import analyze_cell
from accel_nb.notebook.messages import RankAnswer, read_answer
from accel_nb.notebook.output.receipt import receipt_line
from accel_nb.notebook.session.engines import start_engine
from accel_nb.notebook.session.error_translation import error_from_answers
from accel_nb.notebook.session.namespace_session import NamespaceSession
from accel_nb.notebook.session.replica_check import describe_divergence
from accel_nb.notebook.session.run_state import Cell
from accel_nb.pool.engine import Engine, WorkerSpec
from accel_nb.pool.payload import close_all
from accel_nb.pool.pool import Pool
from accel_nb.telemetry.events import WorkerPrepared, from_message
from tests.realworld.values import Entries, read_values
from tests.support.kernel import Output
from tests.support.pools import Recorder

CELL_S = 30
"""How long one program may run on workers."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_READ = """
from tests.realworld.values import write_values as _write
_write({names!r}, globals(), {path!r})
"""
_CLEAR = """
for _name in [name for name in globals() if name not in _kept]:
    del globals()[_name]
import torch, warnings
torch.set_default_dtype(torch.float64)
warnings.resetwarnings()
warnings.simplefilter("default")
del torch, warnings
"""
_KEEP = "_kept = {*globals(), '_kept', '_name'}\n"


class Workers:
    """A pool of workers, without a kernel: requests are those that a notebook's session sends."""

    def __init__(self, engine: Engine, folder: Path, flags: str) -> None:
        self._engine = engine
        self._folder = folder
        self._more_flags = flags
        self._pool: Pool | None = None
        self._flags = resolve([])
        self._session = NamespaceSession({})

    def start(self, size: int) -> None:
        """Start new workers in place of those that run."""
        if self._pool is not None:
            self._pool.detach()
        # One for all programs: the first request reads the code of all modules of the tests.
        self._session = NamespaceSession({})
        self._flags = resolve([parse_flags(f"--cpus {size} --no-panel --no-return {self._more_flags}", "%%accelerate")])
        self._pool = Pool(self._engine, [WorkerSpec("cpu", 1)] * size)
        self._pool.wait_ready()
        self._run_own(_KEEP)

    @property
    def size(self) -> int:
        """The number of workers, 0 before the start."""
        return 0 if self._pool is None else self._pool.size

    def run(self, source: str, names: Sequence[str]) -> tuple[Output, list[Entries]]:
        """Run a program and return what a notebook would show of it, and the values of names by rank."""
        assert self._pool is not None
        self._run_own(_CLEAR)
        recorder = Recorder()
        answers, reason = self._request(source, recorder)
        error = error_from_answers(answers, reason, {}, CELL_S)
        reports: dict[int, WorkerPrepared] = {}
        for rank, topic, body in recorder.messages:
            if topic == "event" and isinstance(event := from_message(body), WorkerPrepared):
                reports[rank] = event
        lines = [receipt_line(self._pool.specs, list(reports.values()))]
        lines += [line for answer in answers for line in answer.reply.lines]
        lines += describe_divergence(answers)
        output = Output(
            stdout=recorder.text.get((0, "stdout"), b"").decode(),
            stderr=recorder.text.get((0, "stderr"), b"").decode(),
            displays=[{"text/plain": line} for line in lines],
        )
        if error is None:
            return output, self._read(names)
        output.error = type(error).__name__, str(error)
        rendered = getattr(error, "_render_traceback_", lambda: [f"{type(error).__name__}: {error}"])()
        output.traceback = _ANSI.sub("", "\n".join(rendered))
        self.start(self._pool.size)
        return output, []

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.detach()
        self._engine.stop()

    def _read(self, names: Sequence[str]) -> list[Entries]:
        assert self._pool is not None
        paths = [self._folder / f"{rank}.json" for rank in range(self._pool.size)]
        self._run_own(*(_READ.format(names=tuple(names), path=str(path)) for path in paths))
        return [read_values(path) for path in paths]

    def _run_own(self, *sources: str) -> None:
        """Run lines outside of a cell's preparation, the same on every rank or different ones."""
        assert self._pool is not None
        by_rank = sources if len(sources) > 1 else sources * self._pool.size
        recorder = Recorder()
        answers, reason = self._request("pass", recorder, dict(enumerate(by_rank)))
        error = error_from_answers(answers, reason, {}, CELL_S)
        if error is not None:
            raise AssertionError(f"{error}\n{recorder.text}") from error

    def _request(
        self, source: str, recorder: Recorder, own: dict[int, str] | None = None
    ) -> tuple[list[RankAnswer], Any]:
        """Send a cell as a notebook without other cells does; or, unprepared, lines of this class for each rank."""
        assert self._pool is not None
        cell = Cell(source, ast.parse(source), 1)
        packed, _ = self._session.pack_cell(
            cell, analyze_cell(cell.tree, {}), self._flags, self._pool, self._engine.facts()
        )
        bodies = packed.bodies
        if own is not None:
            bodies = {rank: {**body, "source": own[rank], "is_empty": True} for rank, body in bodies.items()}
        try:
            results, reason = self._pool.run(
                "run", bodies, recorder, payloads=packed.payloads, timeout_s=CELL_S, poll_s=0.05
            )
            answers = [read_answer(result) for result in results]
            self._session.record_answers(packed, answers)
            return answers, reason
        finally:
            close_all(packed.payloads.values())


@contextmanager
def running_workers(flags: str = "") -> Iterator[Workers]:
    """Yield workers that are not started yet, and end them afterwards. The cells have more ``flags``."""
    with TemporaryDirectory(prefix="accel_nb_properties_") as folder:
        workers = Workers(start_engine(EngineOptions(), {}), Path(folder), flags)
        try:
            yield workers
        finally:
            workers.close()
