"""How the end of a cell on the workers becomes an exception in the kernel, traceback and all."""

from __future__ import annotations

import base64
import builtins
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accel_nb.errors import PoolError, WorkerDied
from accel_nb.forecast.sizes import size_text
from accel_nb.notebook.output.rank_logs import RankLog
from accel_nb.pool.control.stop_escalation import Answer, Reason, describe_exit
from accel_nb.pool.sync import pickling
from accel_nb.telemetry.events import MemorySample

_DEADLOCK = (
    "ranks waited for others that do not come, and would wait for ever (where, is said above). A break or a branch "
    "that a loss or a count decides goes another way on each rank, since each has its share of the samples: decide by "
    "what is equal on all, an evaluation under torch.no_grad() or accelerator.reduce(tensor, 'mean')"
)


def failure_of(
    answers: Sequence[Answer],
    reason: Reason | None,
    logs: Mapping[int, RankLog],
    timeout_s: float | None,
    *,
    has_pool: bool = True,
    remarks: Sequence[str] = (),
    memory: Mapping[int, MemorySample] | None = None,
) -> BaseException | None:
    """Return the exception that a request ended with, or None.

    A rank that died by itself is the cause even if another's broken connection was heard of first; else it is the
    first failure in time. What other ranks raised because of it is folded into a note. Without ``has_pool`` no fresh
    worker could be started in place of a dead one. ``remarks`` are lines to be shown below the traceback, ``memory``
    what each rank's was filled with when it was measured last.
    """
    deaths = [answer for answer in answers if answer.outcome == "died" and not answer.body["killed"]]
    cause = next(iter([*deaths, *(answer for answer in answers if answer.outcome in ("raised", "died"))]), None)
    if reason == "interrupt":
        return with_traceback(KeyboardInterrupt(), [f"KeyboardInterrupt: {_interrupted_words(answers)}"])
    if reason == "timeout":
        words = f"the cell ran longer than its timeout of {timeout_s:g} s: {_interrupted_words(answers)}"
        return with_traceback(TimeoutError(words), [f"TimeoutError: {words}"])
    if reason == "deadlock":
        return PoolError(f"{_DEADLOCK}; {_interrupted_words(answers)}")
    if cause is None:
        return None
    if cause.outcome == "died":
        return _death(cause, answers, logs, memory or {}, has_pool=has_pool)
    return _error(cause, answers, remarks)


def with_traceback(error: BaseException, lines: Sequence[str]) -> BaseException:
    """Make IPython show ``lines`` as the traceback of an error."""
    error._render_traceback_ = lambda: list(lines)  # type: ignore[attr-defined]
    return error


def _interrupted_words(answers: Sequence[Answer]) -> str:
    killed = [answer.rank for answer in answers if answer.outcome == "died"]
    if killed:
        return f"rank {_listed(killed)} did not stop and was ended; the next cell starts with the notebook's values"
    return "stopped on every rank; variables and models are kept"


def _death(
    cause: Answer,
    answers: Sequence[Answer],
    logs: Mapping[int, RankLog],
    memory: Mapping[int, MemorySample],
    *,
    has_pool: bool,
) -> WorkerDied:
    dead = sorted(answer.rank for answer in answers if answer.outcome == "died")
    what = (
        "A fresh worker takes its place; the next cell"
        if has_pool
        else "The process that workers are forked from is gone too. The next cell starts everything anew and"
    )
    killed_for = cause.body.get("killed_for", "unknown")
    words = [
        f"rank {_listed(dead)} {describe_exit(cause.body['code'], killed_for)} while the cell ran. "
        f"{what} starts with the notebook's values on every rank."
    ]
    if killed_for in ("group", "machine") and cause.rank in memory:
        words.append(_last_memory(memory[cause.rank]))
    if cause.rank in logs and (tail := logs[cause.rank].last_lines().strip()):
        words.append(f"Its last output:\n{tail}")
    if stack := cause.body.get("stack", "").strip():
        words.append(f"Its last Python stack:\n{stack}")
    return WorkerDied("\n".join(words), rank=cause.rank)


def _last_memory(sample: MemorySample) -> str:
    sizes = {
        name: getattr(sample, name) for name in ("parameters", "gradients", "optimizer", "other", "cached", "free")
    }
    listed = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size)
    return (
        f"At step {sample.step}, when it was measured last: {listed}. Take smaller batches with --accumulate, "
        "--activation-checkpointing or --strategy fsdp; `%accelerate plan` says what would fit"
    )


def _error(cause: Answer, answers: Sequence[Answer], remarks: Sequence[str]) -> BaseException:
    told = cause.body["error"]
    error = _rebuild(told)
    same, other = [], []
    for answer in answers:
        if answer.rank != cause.rank and answer.outcome == "raised":
            its = answer.body["error"]
            if (its["type"], its["message"]) == (told["type"], told["message"]):
                same.append(answer.rank)
            else:
                other.append(f"rank {answer.rank} then raised {its['type']}: {_first_line(its['message'])}")
    ranks = [cause.rank, *same]
    head = "every rank raised:" if len(ranks) == len(answers) > 1 else f"rank {_listed(ranks)} raised:"
    return with_traceback(error, [head, *told["traceback"], *other, *remarks])


def _rebuild(told: Mapping[str, Any]) -> BaseException:
    """Return an error of the same type where this process can make one, else a PoolError that says the type."""
    if told["pickled"] is not None:
        try:
            error = pickling.load(base64.b64decode(told["pickled"]), [], namespace=sys.modules["__main__"].__dict__)
        except Exception:  # a class whose constructor cannot be replayed: told by its name below
            error = None
        if isinstance(error, BaseException):
            return error
    kind = getattr(builtins, told["type"], None) if told["module"] == "builtins" else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(told["message"])
        except TypeError:
            pass
    return PoolError(f"{told['module']}.{told['type']}: {told['message']}")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:200]
