"""The main process of a self-test: a pool, one request for each check, and a report. Imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import psutil

from accel_nb.errors import PoolError
from accel_nb.pool.control.stop_escalation import RankResult, describe_exit
from accel_nb.pool.engine import WorkerSpec
from accel_nb.pool.local.engine import LocalEngine
from accel_nb.pool.pool import Pool
from accel_nb.telemetry.events import Event

PROGRAM = "accel_nb.selftest.program:CheckProgram"
PRELOAD = ("torch", "torch.distributed", "accel_nb.runtime.distributed.process_group", "accel_nb.selftest.program")
CHECK_NAMES = (
    "world",
    "collectives",
    "loaders",
    "equality",
    "global batches",
    "accumulation",
    "precision",
    "schedule",
    "triggers",
    "random numbers",
    "interrupt",
)
"""The checks in execution order. `checks` defines the functions, and is not imported here since it imports torch."""

DEADLINE_S = 300.0
SHUTDOWN_TIMEOUT_S = 5.0

Outcome = Literal["ok", "failed", "not run"]
_MARKS: dict[Outcome, str] = {"ok": "ok", "failed": "FAILED", "not run": "not run"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check; the detail is a short text, or the errors of all ranks that failed."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """The result of a self-test."""

    devices: tuple[str, ...]
    rows: tuple[CheckResult, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether every check ran and passed."""
        return bool(self.rows) and all(row.outcome == "ok" for row in self.rows)

    def as_json(self) -> str:
        """Return the report as one JSON document."""
        rows = [asdict(row) for row in self.rows]
        return json.dumps({"ok": self.is_ok, "devices": self.devices, "checks": rows}, indent=2) + "\n"

    def as_table(self) -> str:
        """Return the report as lines of text, one for each check."""
        name, mark = max(len(row.name) for row in self.rows), max(map(len, _MARKS.values()))
        lines = [f"{len(self.devices)} workers on {', '.join(dict.fromkeys(self.devices))}"]
        for row in self.rows:
            shown = f"{_MARKS[row.outcome]:<{mark}}"
            detail = row.detail.replace("\n", "\n" + " " * (name + mark + 12))
            lines.append(f"{row.name:<{name}}  {shown}  {row.seconds:5.1f} s  {detail}".rstrip())
        num_ok = sum(row.outcome == "ok" for row in self.rows)
        seconds = sum(row.seconds for row in self.rows)
        lines.append(f"{num_ok} of {len(self.rows)} checks passed in {seconds:.0f} s")
        return "\n".join(lines) + "\n"


@dataclass(slots=True)
class _Listener:
    """A pool listener that collects the workers' output, and counts the ranks that wait for the interrupt."""

    text: bytearray = field(default_factory=bytearray)
    num_waiting: int = 0

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        self.text += data

    def on_message(self, rank: int, topic: str, body: dict[str, Any]) -> None:
        self.num_waiting += topic == "waiting"

    def on_events(self, events: Sequence[Event]) -> None:
        pass

    def on_result(self, answer: RankResult) -> None:
        pass

    def tick(self) -> None:
        pass


def run_checks(
    specs: Sequence[WorkerSpec], *, deadline_s: float = DEADLINE_S, names: Sequence[str] = CHECK_NAMES
) -> SelfTestReport:
    """Run the checks on new workers and return the report, within about ``deadline_s`` seconds.

    A failed check does not stop the others. Checks that do not start in time are reported as not run.
    """
    devices = tuple(spec.device for spec in specs)
    ends_at = time.monotonic() + deadline_s
    rows: list[CheckResult] = []
    engine = LocalEngine(PROGRAM, preload=PRELOAD)
    try:
        started = time.monotonic()
        try:
            pool = Pool(engine, specs)
            pool.wait_ready()
        except PoolError as error:
            return SelfTestReport(
                devices, (CheckResult("start", "failed", time.monotonic() - started, str(error)), *_not_run(names))
            )
        rows.append(CheckResult("start", "ok", time.monotonic() - started, "a process group over all workers"))
        for index, name in enumerate(names):
            remaining_s = ends_at - time.monotonic()
            if remaining_s <= 0 or pool.state == "failed":
                rows += _not_run(names[index:])
                break
            rows.append(_run_check(pool, name, remaining_s))
    finally:
        started = time.monotonic()
        processes = _descendants(engine.zygote_pid)
        engine.stop()
    _, alive = psutil.wait_procs(processes, timeout=SHUTDOWN_TIMEOUT_S)
    rows.append(
        CheckResult(
            "shutdown",
            "failed" if alive else "ok",
            time.monotonic() - started,
            f"{len(processes) - len(alive)} of {len(processes)} processes of the workers have ended",
        )
    )
    return SelfTestReport(devices, tuple(rows))


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:  # the zygote has ended already, and its workers with it
        return []


def _not_run(names: Sequence[str]) -> list[CheckResult]:
    return [CheckResult(name, "not run", detail="the deadline had passed, or the workers had ended") for name in names]


def _run_check(pool: Pool, name: str, remaining_s: float) -> CheckResult:
    listener, is_interrupt = _Listener(), name == "interrupt"
    started = time.monotonic()
    try:
        answers, reason = pool.run(
            "check",
            {rank: {"name": name} for rank in range(pool.size)},
            listener,
            num_interrupts=lambda: int(is_interrupt and listener.num_waiting == pool.size),
            timeout_s=remaining_s,
        )
        if is_interrupt:
            pool.wait_ready()
    except PoolError as error:
        return CheckResult(name, "failed", time.monotonic() - started, str(error))
    seconds = time.monotonic() - started
    if is_interrupt and reason == "interrupt" and all(answer.outcome == "interrupted" for answer in answers):
        return CheckResult(name, "ok", seconds, "a collective was interrupted, and the workers keep running")
    if not is_interrupt and all(answer.outcome == "done" for answer in answers):
        return CheckResult(name, "ok", seconds, min(answers, key=lambda answer: answer.rank).body["detail"])
    return CheckResult(name, "failed", seconds, _describe_failure(answers, reason, listener))


def _describe_failure(answers: Sequence[RankResult], reason: str | None, listener: _Listener) -> str:
    errors = [
        f"rank {answer.rank}: {answer.body['error'] if answer.death is None else describe_exit(answer.death.code)}"
        for answer in sorted(answers, key=lambda answer: answer.rank)
        if answer.outcome in ("raised", "died") and not (answer.death and answer.death.is_killed)
    ]
    if reason == "timeout":
        errors.append("the deadline passed")
    printed = listener.text.decode(errors="replace").strip()
    return "\n".join([*(errors or ["it ended in an unexpected way"]), *printed.splitlines()[-5:]])
