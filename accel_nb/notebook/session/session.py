"""The connection of one notebook to its workers: starts them and runs cells and launches on them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from accel_nb.config import Config, Layer, Resolved, resolve
from accel_nb.config.engine_section import EngineOptions
from accel_nb.errors import PoolError, UnknownNameError
from accel_nb.notebook.cells.call import read_result
from accel_nb.notebook.cells.cell_analysis import analyze_cell
from accel_nb.notebook.messages import PullRequest, RankAnswer, to_body
from accel_nb.notebook.output.cell_output import SENDING
from accel_nb.notebook.output.rank_logs import RankLog
from accel_nb.notebook.session.background import BackgroundRun
from accel_nb.notebook.session.background_results import apply_results
from accel_nb.notebook.session.environment_sync import has_other_gpus
from accel_nb.notebook.session.error_translation import error_from_answers
from accel_nb.notebook.session.interrupts import DeferredTermination, count_interrupts
from accel_nb.notebook.session.namespace_session import NamespaceSession
from accel_nb.notebook.session.notebook_workers import LOCAL, EngineFactory, NotebookWorkers
from accel_nb.notebook.session.rank_answers import split_results, without_returns
from accel_nb.notebook.session.recording import end_of_run, record_run
from accel_nb.notebook.session.replica_check import describe_divergence
from accel_nb.notebook.session.run_creation import create_run
from accel_nb.notebook.session.run_state import Cell, CellRun, PackedCell, status_of
from accel_nb.notebook.session.worker_requests import RequestOutcome, SilentListener, send_request
from accel_nb.pool.control.stop_escalation import Reason
from accel_nb.pool.device_assignment import DeviceReservations, assign_workers
from accel_nb.pool.engine import EngineFacts, WorkerSpec
from accel_nb.pool.payload import close_all
from accel_nb.pool.pool import START_TIMEOUT_S, Pool, RequestListener
from accel_nb.pool.sync.paths.object_paths import root_name
from accel_nb.runs.notification import notify
from accel_nb.runtime.process.environment import GPU_VARIABLE
from accel_nb.telemetry.metrics import Exporters
from accel_nb.ui.run_comparison import EarlierRuns


@dataclass(slots=True)
class SessionStatus:
    """The facts that `%accelerate status` shows."""

    state: str
    specs: tuple[WorkerSpec, ...]
    pids: dict[int, int]
    zygote_pid: int | None
    nodes: tuple[str, ...]
    """The names of the nodes by number; empty if all workers run on this machine."""
    lost_nodes: Mapping[int, str]
    resident_bytes: Mapping[int, int]
    """The memory of workers on other machines, by rank."""
    only_on_workers: dict[str, str]
    last_cell_s: float | None


@dataclass(slots=True)
class Session:
    """The engine and the pool of one kernel. No process starts before `warm_up` or the first cell."""

    namespace: dict[str, Any]
    start_engine: EngineFactory
    hidden_names: Collection[str] = ()
    logs: dict[int, RankLog] = field(default_factory=dict)
    on_change: Callable[[], None] = lambda: None
    """Called when the pool's state or workers may have changed."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the workers that replace the notebook's."""
    notebook_layers: tuple[Layer, ...] = ()
    """Options from the notebook's metadata, as the browser sent them."""
    connected_layers: tuple[Layer, ...] = ()
    """The options of `%accelerate connect`, over those of the notebook."""
    device_claims: DeviceReservations = field(default_factory=DeviceReservations)
    """Devices in use by the launches and cells of this notebook that run concurrently."""
    namespace_lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while values are packed or applied; the sessions of one notebook share it."""
    background: BackgroundRun | None = None
    """The cell that runs in the background, or the last one that did."""
    last_run: CellRun | None = None
    """The run that started last."""
    namespace_session: NamespaceSession = field(init=False)
    """The names that the notebook and its workers share."""
    exporters: Exporters = field(default_factory=Exporters)
    """Exporters of metrics to monitoring systems."""
    earlier_runs: EarlierRuns = field(default_factory=EarlierRuns)
    """Earlier runs, for comparison on the panel."""
    _workers: NotebookWorkers = field(init=False)
    _last_cell_s: float | None = None
    _termination: DeferredTermination | None = None
    _resolved: tuple[str, Resolved] | None = None
    _busy: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.namespace_session = NamespaceSession(self.namespace, self.hidden_names)
        self._workers = NotebookWorkers(
            self.start_engine, self.overrides, on_lost=self.namespace_session.reset, on_stop=self._reset
        )

    def _reset(self) -> None:
        """Reset what depends on processes that have ended."""
        self.exporters.close()
        self.namespace_session.reset()
        self.on_change()

    def resolve(self, layers: Sequence[Layer]) -> Resolved:
        """Resolve the options of a launch. The last result is cached, since launches are mostly repeated unchanged."""
        key = repr([(layer.name, layer.source, dict(layer.values), dict(layer.places)) for layer in layers])
        if self._resolved is None or self._resolved[0] != key or self._resolved[1].config.config is not None:
            self._resolved = key, resolve(layers)
        return self._resolved[1]

    def reserve(self) -> bool:
        """Reserve the workers for this thread until `release`; return False when they are in use."""
        if self._running_in_background is not None:
            return False
        return self._busy.acquire(blocking=False)

    def release(self) -> None:
        """Release the workers after a successful `reserve` in this thread."""
        self._busy.release()

    def warm_up(self, options: EngineOptions = LOCAL) -> None:
        """Start the engine; the local one starts its zygote in the background and returns at once."""
        self._workers.warm_up(options)

    def run(
        self,
        cell: Cell,
        resolved: Resolved,
        specs: Sequence[WorkerSpec],
        *,
        mode: str,
        is_last_try: bool = True,
    ) -> list[Any]:
        """Run a cell on the workers and apply what it bound and trained to the notebook's namespace.

        Return the results of a call in rank order, and an empty list for a cell. Raise the cell's error. If it fails
        and ``is_last_try`` is false, nothing in the notebook changes.
        """
        with self._reserved(), self.namespace_session.bind_call(cell.call):
            running = self._create_run(cell, resolved, specs, mode)
            return (
                []
                if running is None
                else self._run_with_output(running, cell, resolved, specs, is_last_try=is_last_try)
            )

    def start_in_background(
        self, cell: Cell, resolved: Resolved, specs: Sequence[WorkerSpec], *, mode: str
    ) -> BackgroundRun | None:
        """Send a cell to the workers and return while it runs; return None for an empty cell.

        The workers receive the notebook's values at this time. `collect_background` applies the results.
        """
        with self._reserved(), ExitStack() as claim:
            claim.callback(self.device_claims.reserve_first(specs))
            running = self._create_run(cell, resolved, specs, mode)
            if running is None:
                return None
            try:
                packed = self._pack(cell, running, resolved, specs)
            except BaseException:
                running.finish("failed")
                raise
            saves = resolved.config.checkpoint.dir is not None
            if saves:
                self._termination = DeferredTermination(running.controls.queue.interrupt_once)
            shared = {root_name(name) for name in self.namespace_session.shared_names}

            claimed = claim.pop_all()

            def execute(output: RequestListener) -> tuple[list[RankAnswer], Reason | None]:
                with claimed:
                    answers, reason, _ = self._execute(packed, running, output, saves=saves)
                    running.closing_lines.extend(_describe_answers(answers))
                    return answers, reason

            self.background = BackgroundRun(
                running,
                self.namespace,
                {name: self.namespace[name] for name in shared if name in self.namespace},
                execute,
                lambda answers, reason: self._determine_error(running, answers, reason),
                self.collect_background,
                lambda error: self._on_background_end(running, cell, resolved, error),
            )
        self.on_change()
        return self.background

    def _on_background_end(self, running: CellRun, cell: Cell, resolved: Resolved, error: BaseException | None) -> None:
        _report_end(running, cell, resolved, error)
        self.exporters.flush()
        self.on_change()
        if self._termination is not None:
            self._termination.run_ended()

    def collect_background(self) -> None:
        """Apply the results of a background run that has ended, and print which names changed. Called between cells.

        The namespace is then as if the cell had ended now: a name that was rebound in the notebook during the run has
        the run's value if the run returned one.
        """
        background = self.background
        if background is None or background.is_running or background.are_results_applied:
            return
        background.join()
        if self._termination is not None:
            self._termination.release()
            self._termination = None
        with count_interrupts(), self.namespace_lock:
            background.are_results_applied = True
            try:
                lines = apply_results(background, self.namespace_session)
            finally:
                background.values_at_start = {}  # they would keep objects in memory that the notebook deletes
                self._reset_if_worker_died(background.answers)
        self._last_cell_s = background.running.elapsed_s
        for line in lines:
            print(line)
        self.on_change()

    @property
    def _running_in_background(self) -> BackgroundRun | None:
        return self.background if self.background is not None and self.background.is_running else None

    @contextmanager
    def reserving_devices(self, specs: Sequence[WorkerSpec]) -> Iterator[None]:
        """Reserve the workers and their GPUs while the block runs; raise PoolError when they are in use."""
        with self._reserved(), ExitStack() as claim:
            claim.callback(self.device_claims.reserve_first(specs))
            yield

    @contextmanager
    def _reserved(self) -> Iterator[None]:
        self.collect_background()
        if self._running_in_background is not None:
            raise PoolError(_describe_busy(self._running_in_background))
        if not self.reserve():
            raise PoolError("the workers are busy with a launch in another thread; wait until it has ended")
        try:
            yield
        finally:
            self.release()

    def _create_run(self, cell: Cell, resolved: Resolved, specs: Sequence[WorkerSpec], mode: str) -> CellRun | None:
        """Create the run of a cell and show its output; return None for an empty cell."""
        names = analyze_cell(cell.tree, self.namespace_session.user_names, self.namespace_session.references)
        if names.is_empty:
            return None
        running = self.last_run = create_run(
            cell,
            names,
            resolved,
            specs,
            mode=mode,
            is_new=self._workers.pool is None or self._workers.pool.specs != tuple(specs),
            namespace=self.namespace,
            exporters=self.exporters,
            earlier_runs=self.earlier_runs,
        )
        self.logs = running.output.logs
        return running

    def _run_with_output(
        self,
        running: CellRun,
        cell: Cell,
        resolved: Resolved,
        specs: Sequence[WorkerSpec],
        *,
        is_last_try: bool,
    ) -> list[Any]:
        status, has_sigterm = "failed", False
        try:
            packed = self._pack(cell, running, resolved, specs)
            saves = resolved.config.checkpoint.dir is not None
            # An interrupt after the request would leave partly copied weights, or old values, in the notebook.
            with count_interrupts():
                answers, reason, has_sigterm = self._execute(packed, running, running.output, saves=saves)
                answers, returned = self._apply(running, answers, is_last_try=is_last_try)
            error = self._determine_error(running, answers, reason)
            status = status_of(error)
        finally:
            running.finish(status)
            self.exporters.flush()
            self._last_cell_s = running.elapsed_s
            self.on_change()
            if has_sigterm:
                signal.raise_signal(signal.SIGTERM)
        _report_end(running, cell, resolved, error)
        if error is not None:
            raise error  # %debug stops here: the frames of the workers are in the traceback only
        return returned

    def _apply(
        self, running: CellRun, answers: list[RankAnswer], *, is_last_try: bool
    ) -> tuple[list[RankAnswer], list[Any]]:
        """Apply what the ranks returned to the notebook; return the answers, and the results of a call by rank."""
        answers, results = split_results(answers)
        if not is_last_try and any(answer.outcome in ("raised", "died") for answer in answers):
            answers = without_returns(answers)
        running.closing_lines += _describe_answers(answers)
        try:
            with self.namespace_lock:
                running.closing_lines += self.namespace_session.apply_answers(answers)
                return answers, [read_result(results[rank], self.namespace) for rank in sorted(results)]
        finally:
            close_all(results.values())
            self._reset_if_worker_died(answers)

    def _determine_error(
        self, running: CellRun, answers: list[RankAnswer], reason: Reason | None
    ) -> BaseException | None:
        """Return the error that a cell raises, if any."""
        from accel_nb.notebook.session.post_mortem import describe_out_of_memory  # imports memory forecasts

        return error_from_answers(
            answers,
            reason,
            running.output.logs,
            running.config.timeout,
            has_pool=self._workers.pool is not None and self._workers.pool.state != "failed",
            closing_lines=describe_out_of_memory(answers, dict(self.namespace), running.config, running.specs),
            memory=running.output.memory,
        )

    def pull(self, names: Sequence[str]) -> list[str]:
        """Fetch names from rank 0, regardless of size, and return them.

        Raise UnknownNameError for names that rank 0 does not have, PoolError for values that cannot be copied.
        """
        pool = self._require_pool()
        body = to_body(PullRequest(tuple(names), tuple(self.namespace_session.shared_names)))
        answers, reason, _ = send_request(pool, "pull", dict.fromkeys(range(pool.size), body), SilentListener())
        error = error_from_answers(answers, reason, {}, None)
        if error is not None:
            self._reset_if_worker_died(answers)
            raise error
        with count_interrupts(), self.namespace_lock:
            lines = self.namespace_session.apply_answers(answers)
        if lines:
            raise PoolError("; ".join(lines))
        return list(names)

    def push(self, names: Sequence[str]) -> None:
        """Mark names to be sent again with the next cell that uses them.

        Raise UnknownNameError for names that the notebook lacks, ShippingError for values that cannot be sent.
        """
        missing = [name for name in names if name not in self.namespace]
        if missing:
            raise UnknownNameError(f"the notebook has no name {', '.join(map(repr, missing))}")
        self.namespace_session.require_sendable(names)
        self.namespace_session.mark_for_sending(names)

    def poll(self) -> None:
        """Process events of the workers since the last cell, such as deaths, without waiting."""
        if self._running_in_background is not None:
            return  # its thread polls
        self._workers.poll()

    def status(self) -> SessionStatus:
        """Return the state of the pool at the last poll. Thread-safe."""
        pool, facts = self._workers.pool, self._workers.facts()
        state = pool.state if pool else "not started" if facts is None else "warm" if facts.is_warm else "warming up"
        return SessionStatus(
            state=state,
            specs=pool.specs if pool else (),
            pids=dict(facts.pids) if facts and pool else {},
            zygote_pid=facts.zygote_pid if facts else None,
            nodes=facts.nodes if facts else (),
            lost_nodes=facts.lost_nodes if facts else {},
            resident_bytes=facts.resident_bytes if facts else {},
            only_on_workers=dict(self.namespace_session.only_on_workers),
            last_cell_s=self._last_cell_s,
        )

    def engine_facts(self) -> EngineFacts | None:
        """Return the latest known state of the engine; None if none runs."""
        return self._workers.facts()

    def discard_workers(self) -> None:
        """End the workers; the next cell forks new ones from the same zygote, with the notebook's values."""
        self._workers.discard_pool()

    def assign_workers(self, config: Config, *, num_reserved: int = 0) -> tuple[WorkerSpec, ...]:
        """Return one spec for each worker of a run: on this machine, or on the nodes that the engine has not lost.

        Other runs use the first ``num_reserved`` GPUs of this machine. Raise PoolError if no node is left.
        """
        lost = self._workers.lost_nodes(config.engine)
        specs = assign_workers(config, lost=lost, num_reserved=num_reserved)
        if not specs:
            self.stop()
            raise PoolError(f"{'; '.join(lost.values())}. No node is left; the next cell starts the engine again")
        return specs

    def start_workers(self, specs: Sequence[WorkerSpec], options: EngineOptions = LOCAL) -> None:
        """Start workers on these devices now instead of with the first cell."""
        try:
            with self._reserved():
                self._workers.ensure_pool(specs, options, START_TIMEOUT_S)
        finally:
            self.on_change()

    def connect(self, layer: Layer, options: EngineOptions) -> None:
        """Start the engine of ``options`` now, and use the options of ``layer`` for this and later runs.

        Returns when each node has reported its machine. Raises ConfigError or PoolError, and later runs are as before,
        if the engine cannot be started.
        """
        with self._reserved():
            self.stop()
            if options == LOCAL:
                self.connected_layers = ()
                return
            self._workers.connect(options)
            self.connected_layers = (layer,)
        self.on_change()

    def stop(self) -> None:
        """End every process; the next cell starts new ones. Does nothing when no process runs.

        A background run is interrupted first, and its results are applied.
        """
        if self._running_in_background is not None:
            self._running_in_background.interrupt_until_ended()
        self.collect_background()
        self._workers.stop()

    def _pack(self, cell: Cell, running: CellRun, resolved: Resolved, specs: Sequence[WorkerSpec]) -> PackedCell:
        """Start workers if needed, and pack the values that the cell needs and the workers lack."""
        lines = running.closing_lines
        start_timeout_s = START_TIMEOUT_S if cell.call is None else cell.call.start_timeout_s
        pool = self._workers.ensure_pool(
            specs, resolved.config.engine, start_timeout_s, on_phase=running.output.set_phase
        )
        facts = self._workers.facts()
        assert facts is not None
        if facts.num_threads > 1:
            lines.append(
                f"the process that workers are forked from runs {facts.num_threads} threads: workers may hang; "
                "something that Python loads at its start makes threads"
            )
        lines += [f"{reason}; this cell runs on the other nodes" for reason in facts.lost_nodes.values()]
        if has_other_gpus(facts.variables):
            lines.append(f"{GPU_VARIABLE} was changed after the workers started: `%accelerate restart` applies it")
        resolved.check_world(pool.size)
        running.output.set_phase(SENDING)
        with self.namespace_lock:
            packed, notes = self.namespace_session.pack_cell(cell, running.names, resolved, pool, facts)
        lines += notes
        return packed

    def _execute(
        self, packed: PackedCell, running: CellRun, listener: RequestListener, *, saves: bool
    ) -> RequestOutcome:
        """Run a packed cell on the workers. It neither reads nor changes the notebook's names."""
        try:
            outcome = send_request(
                packed.pool,
                "run",
                packed.bodies,
                listener,
                payloads=packed.payloads,
                timeout_s=running.config.timeout,
                may_finish_step=saves,
                actions=running.controls.queue,
                poll_s=packed.poll_s,
            )
            self.namespace_session.record_answers(packed, outcome.answers)
            return outcome._replace(answers=[answer for answer in outcome.answers if not answer.reply.was_idle])
        except BaseException:
            self.namespace_session.record_undelivered()
            raise
        finally:
            close_all(packed.payloads.values())

    def _reset_if_worker_died(self, answers: Iterable[RankAnswer]) -> None:
        """Mark all values to be sent again if a worker died, since its replacement has none."""
        if any(answer.outcome == "died" for answer in answers):
            self.namespace_session.reset()

    def _require_pool(self) -> Pool:
        self.collect_background()
        if (background := self._running_in_background) is not None:
            raise PoolError(
                f"{background.status()}: variables cannot be fetched while it changes them. They are returned "
                "when it has ended; `%accelerate inspect NAMES` shows them after the next step"
            )
        return self._workers.require_pool()


def _describe_busy(background: BackgroundRun) -> str:
    return (
        f"the workers are busy: {background.status()}. `%accelerate wait` waits for it, "
        "`%accelerate stop --after-step` ends it after the step, `%accelerate interrupt` at once"
    )


def _describe_answers(answers: Sequence[RankAnswer]) -> list[str]:
    """Return the lines to show below the output: those of the ranks, and one if their weights have diverged."""
    return [line for answer in answers for line in answer.reply.lines] + describe_divergence(answers)


def _report_end(running: CellRun, cell: Cell, resolved: Resolved, error: BaseException | None) -> None:
    """Record a run that has ended, and send the notifications that its options name."""
    state = running.output.panel_state
    end = end_of_run(state, running.elapsed_s, error)
    record_run(cell.source, resolved, state, end)
    notify(end, resolved.config.notify)
