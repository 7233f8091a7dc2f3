"""A job on ranks of this machine, which are started, monitored, stopped and restarted together.

A rank is a process with the environment of ``torchrun``. The launcher imports no torch and hosts no store: the ranks
of an accelerator open their process group over an inherited anonymous file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from accel_nb.launch.rank_task import FINISHING, HANDLING, RankTask
from accel_nb.launch.stall_reporter import StallComparer
from accel_nb.notebook.session.interrupts import InterruptCount, count_interrupts
from accel_nb.pool.control.stop_escalation import FINISH_TIMEOUT_S, GRACE_S, PEER_FAILURE_DELAY_S, describe_exit
from accel_nb.pool.engine import WorkerSpec
from accel_nb.runtime.process.environment import LAUNCH_STORE, all_variables, rank_variables
from accel_nb.runtime.process.loopback import find_loopback
from accel_nb.runtime.process.platforms import detect_platform
from accel_nb.runtime.world import World

POLL_S = 0.05
TAIL_BYTES = 4096
PEER_EXIT_TIMEOUT_S = 10.0
"""How long the other ranks may run after the first rank has ended."""
TIMED_OUT = 124
"""The exit code of a job that ran longer than its timeout, the same as that of timeout(1)."""

INLINE = "module://matplotlib_inline.backend_inline"
"""The backend that makes figures displays of the notebook."""

EndReason = Literal["failed", "interrupted", "timeout"]


@dataclass(slots=True)
class RankProcess:
    """One rank's process, and the files that it writes to."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    report_file: int
    location_file: int
    log: int | None
    code: int | None = None
    ended: float = 0.0
    was_killed: bool = False

    def close(self) -> None:
        """Close the descriptors of the rank."""
        for descriptor in (self.pidfd, self.report_file, self.location_file, *([] if self.log is None else [self.log])):
            os.close(descriptor)

    def failure_report(self) -> dict[str, Any] | None:
        """Return the rank's report of its failure, if there is one."""
        lines = os.pread(self.report_file, os.fstat(self.report_file).st_size, 0).splitlines()
        with suppress(ValueError):
            if lines and "type" in (report := json.loads(lines[-1])):
                return report
        return None

    def will_finish(self) -> bool:
        """Return whether the rank has reported, after SIGTERM, that it will stop at the end of a step."""
        return os.pread(self.report_file, len(FINISHING), 0) == FINISHING

    def is_handling(self) -> bool:
        """Return whether the rank has reported that KeyboardInterrupt was raised in its code, and not that it ended."""
        return os.pread(self.report_file, os.fstat(self.report_file).st_size, 0).endswith(HANDLING)

    def tail(self) -> str:
        """Return the end of the output of a rank whose output is not shown."""
        if self.log is None:
            return ""
        size = os.fstat(self.log).st_size
        return os.pread(self.log, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of one attempt to run the job."""

    code: int
    reason: EndReason | None = None
    lines: tuple[str, ...] = ()


@dataclass(slots=True)
class LocalJob:
    """A task on ranks of this machine. ``is_slow_to_finish``: it may run on after SIGTERM, to save a notebook."""

    task: RankTask
    args: Sequence[str]
    specs: Sequence[WorkerSpec]
    shown_ranks: frozenset[int] = frozenset({0})
    is_slow_to_finish: bool = False
    timeout_s: float | None = None
    max_restarts: int = 0
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks in addition to those of this process."""

    def run(self) -> JobResult:
        """Run until every rank has succeeded, or no restart is left; return how the job ended."""
        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        with count_interrupts(terminations=True) as interrupts:
            for attempt in range(self.max_restarts + 1):
                result = self._run_attempt(attempt, interrupts, deadline)
                for line in result.lines:
                    self.report(line)
                if result.reason != "failed" or attempt == self.max_restarts:
                    return result
                self.report(f"restart {attempt + 1} of {self.max_restarts}")
        raise AssertionError("the last attempt returns")

    def _run_attempt(self, attempt: int, interrupts: InterruptCount, deadline: float | None) -> JobResult:
        ranks: list[RankProcess] = []
        store = os.memfd_create("accel_nb_store", os.MFD_CLOEXEC)
        try:
            port = _free_port()
            for number in range(len(self.specs)):
                ranks.append(self._start_rank(number, attempt, store, port))  # noqa: PERF401  started ranks are ended below
            stopper = JobStopper(ranks, is_slow_to_finish=self.is_slow_to_finish)
            comparer = StallComparer({rank.number: rank.location_file for rank in ranks}, self.report)
            while running := {rank.number for rank in ranks if rank.code is None}:
                _wait_for_ends(ranks)
                comparer.update(running)
                stopper.update(interrupts, is_late=deadline is not None and time.monotonic() > deadline)
            return _make_result(ranks, stopper.reason, interrupts)
        finally:
            os.close(store)
            for rank in ranks:
                if rank.code is None:
                    _signal(rank, signal.SIGKILL)
                    rank.process.wait()
                rank.close()

    def _start_rank(self, number: int, attempt: int, store: int, port: int) -> RankProcess:
        with ExitStack() as on_failure:
            report = os.memfd_create("accel_nb_report", os.MFD_CLOEXEC)
            on_failure.callback(os.close, report)
            place = os.memfd_create("accel_nb_place", os.MFD_CLOEXEC)
            on_failure.callback(os.close, place)
            log = None if number in self.shown_ranks else self._open_log(number)
            if log is not None:
                on_failure.callback(os.close, log)
            task = replace(self.task, report_file=report, location_file=place, parent=os.getpid())
            process = subprocess.Popen(
                task.command(sys.executable, self.args),
                env={**self._variables_of(number, attempt, store, port), **self.variables},
                pass_fds=[report, place, store],
                stdin=None if number == 0 and len(self.specs) == 1 else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
            )
            on_failure.callback(process.wait)
            on_failure.callback(process.kill)
            rank = RankProcess(number, process, os.pidfd_open(process.pid), report, place, log)
            on_failure.pop_all()
            return rank

    def _variables_of(self, number: int, attempt: int, store: int, port: int) -> dict[str, str]:
        """Return the environment variables of a rank, without those of the task."""
        world = World(number, len(self.specs), number, len(self.specs))
        variables = {**detect_platform().worker_variables, **all_variables()}
        if self.task.kind != "notebook":
            variables |= rank_variables(world, address="127.0.0.1", port=port)
            variables |= {
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
                "TORCHELASTIC_RUN_ID": self.variables.get("TORCHELASTIC_RUN_ID", "none"),
                "GLOO_SOCKET_IFNAME": find_loopback(),
                LAUNCH_STORE: str(store),
            }
            variables.setdefault("OMP_NUM_THREADS", str(self.specs[number].num_threads))
        else:
            variables["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
            variables.setdefault("MPLBACKEND", INLINE)
        return variables

    def _open_log(self, number: int) -> int:
        """Return the file for output that is not shown: in the folder of the run's record, else an anonymous one."""
        if self.task.folder is None:
            return os.memfd_create("accel_nb_log", os.MFD_CLOEXEC)
        path = os.path.join(self.task.folder, f"rank{number}.log")
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


@dataclass(slots=True)
class JobStopper:
    """Decides when ranks that still run are sent SIGTERM to finish, SIGINT, or SIGKILL."""

    ranks: Sequence[RankProcess]
    is_slow_to_finish: bool
    clock: Callable[[], float] = time.monotonic
    send: Callable[[RankProcess, int], None] = lambda rank, number: _signal(rank, number)
    will_finish: Callable[[RankProcess], bool] = RankProcess.will_finish
    is_handling: Callable[[RankProcess], bool] = RankProcess.is_handling
    reason: EndReason | None = None
    _num_handled: int = 0
    _stage: int = 0
    _since: float = 0.0
    _failure_time: float | None = None

    def update(self, interrupts: Callable[[], int], *, is_late: bool = False) -> None:
        """Escalate, if it is due: finish (SIGTERM), interrupt (SIGINT), kill (SIGKILL).

        After an interrupt by the user it is not due while the code of a rank handles the KeyboardInterrupt.
        """
        now = self.clock()
        num_interrupts = interrupts()  # read once: another may arrive at any time
        is_interrupted, self._num_handled = num_interrupts > self._num_handled, num_interrupts
        if self._failure_time is None and any(rank.code not in (None, 0) for rank in self.ranks):
            self._failure_time = now
        has_failed = self._failure_time is not None and now - self._failure_time > PEER_FAILURE_DELAY_S
        if self._stage == 0:
            if not (is_interrupted or is_late or has_failed):
                return
            self.reason = "interrupted" if is_interrupted else "timeout" if is_late else "failed"
            self._escalate(2 if has_failed else 1, now)
            return
        if self._stage == 1 and self.reason == "interrupted" and not is_late and self._are_some_handling():
            self._since = now
        if is_interrupted or now > self._deadline():
            self._escalate(self._stage + 1, now)

    def _are_some_handling(self) -> bool:
        return any(rank.code is None and self.is_handling(rank) for rank in self.ranks)

    def _deadline(self) -> float:
        if self._stage > 1 or not (self.is_slow_to_finish or any(map(self.will_finish, self.ranks))):
            return self._since + GRACE_S
        until = self._since + FINISH_TIMEOUT_S
        # Ranks finish together: if one has ended alone, the others wait for it until they are stopped.
        return until if self._failure_time is None else min(until, self._failure_time + PEER_EXIT_TIMEOUT_S)

    def _escalate(self, stage: int, now: float) -> None:
        self._stage, self._since = stage, now
        number = {1: signal.SIGTERM, 2: signal.SIGINT}.get(stage, signal.SIGKILL)
        for rank in self.ranks:
            if rank.code is None:
                rank.was_killed = rank.was_killed or stage > 1
                self.send(rank, number)


def _wait_for_ends(ranks: Sequence[RankProcess]) -> None:
    """Wait at most `POLL_S` for ranks to end, and reap those that have."""
    running = {rank.pidfd: rank for rank in ranks if rank.code is None}
    poller = select.poll()
    for watch in running:
        poller.register(watch, select.POLLIN)
    for watch, _ in poller.poll(POLL_S * 1000):
        rank = running[watch]
        _signal(rank, signal.SIGKILL)  # for the rest of its process group; its id is not reused before the wait
        rank.code, rank.ended = rank.process.wait(), time.time()


def _signal(rank: RankProcess, number: int) -> None:
    """Signal a rank. Each rank leads a process group: SIGKILL goes to the processes that it has started too."""
    with suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL:
            os.killpg(rank.process.pid, number)
        else:
            os.kill(rank.process.pid, number)


def _make_result(ranks: Sequence[RankProcess], reason: EndReason | None, interrupts: InterruptCount) -> JobResult:
    """Return how the job ended: with the exit code of the rank that failed first."""
    failed = [rank for rank in ranks if rank.code]
    if reason == "interrupted":
        return JobResult(128 + (signal.SIGTERM if interrupts.has_sigterm else signal.SIGINT), reason)
    if reason == "timeout":
        return JobResult(TIMED_OUT, reason, ("the job ran longer than its timeout, and was stopped",))
    if not failed:
        return JobResult(0)
    cause = min(failed, key=lambda rank: (rank.was_killed and not _has_raised(rank), _failure_time(rank)))
    lines = [_describe_failure(cause, len(ranks))]
    for rank in failed:
        report = rank.failure_report()
        if rank is not cause and report is not None and _has_raised(rank):
            first = (report["message"].splitlines() or [""])[0][:200]
            lines.append(f"rank {rank.number} then raised {report['type']}: {first}")
    code = cause.code or 1
    return JobResult(code if code > 0 else 128 - code, "failed", tuple(lines))


def _has_raised(rank: RankProcess) -> bool:
    """Return whether the rank has reported an error of its own; it may have been killed before it exited."""
    report = rank.failure_report()
    return report is not None and report["type"] != "KeyboardInterrupt"


def _failure_time(rank: RankProcess) -> float:
    report = rank.failure_report()
    return rank.ended if report is None else float(report["time"])


def _describe_failure(rank: RankProcess, size: int) -> str:
    report = rank.failure_report()
    if report is not None:
        head = f"rank {rank.number} of {size} raised:\n" if size > 1 else ""
        return head + report["traceback"].rstrip()
    assert rank.code is not None
    if size == 1 and rank.code > 0:
        return f"the job exited with code {rank.code}"
    tail = rank.tail().strip()
    end = f"\nIts last output:\n{tail}" if tail else ""
    return f"rank {rank.number} of {size} {describe_exit(rank.code)}{end}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
