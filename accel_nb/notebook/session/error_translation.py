"""Translation of the workers' answers into the exception that the kernel raises, with its traceback."""

from __future__ import annotations

import base64
import builtins
import sys
from collections.abc import Mapping, Sequence

from accel_nb.config.byte_sizes import size_text
from accel_nb.errors import PoolError, WorkerDied
from accel_nb.notebook.messages import ErrorReport, RankAnswer
from accel_nb.notebook.output.rank_logs import RankLog
from accel_nb.pool.control.stop_escalation import Reason, WorkerDeath, describe_exit
from accel_nb.pool.sync.stream import pickling
from accel_nb.telemetry.events import MemorySample

_NOT_STOPPED = "did not stop and was ended; the next cell starts with the notebook's values"
_OF_OPTION = "_accel_nb_option_timeout"
_ERROR_IN_HANDLING = (
    "The code that handled the interrupt raised on rank {rank} what follows. Ranks are interrupted after different "
    "steps, and exchange nothing any more in the cell: compute models in the next one."
)
_DEADLOCK = (
    "ranks waited in a collective that others never reach (their positions are above). A break or a branch that "
    "depends on a loss or a count may differ between ranks, since each has its own share of the samples: base it on a "
    "value that is equal on all, from an evaluation under torch.no_grad() or accelerator.reduce(tensor, 'mean')"
)


def error_from_answers(
    answers: Sequence[RankAnswer],
    reason: Reason | None,
    logs: Mapping[int, RankLog],
    timeout_s: float | None,
    *,
    has_pool: bool = True,
    remarks: Sequence[str] = (),
    memory: Mapping[int, MemorySample] | None = None,
) -> BaseException | None:
    """Return the exception to raise for a request, or None if it succeeded.

    The cause is a rank that died without being killed, even if another rank's broken connection was reported first;
    else the first failure in time. Errors of other ranks that follow from it become one line each.

    Args:
        answers: the answers of all ranks, in order of arrival.
        reason: why the request was ended early, if it was.
        logs: the output of each rank.
        timeout_s: the timeout that the request ran under.
        has_pool: whether dead workers could be replaced.
        remarks: lines to show below the traceback.
        memory: the last memory sample of each rank.
    """
    deaths = [answer for answer in answers if answer.death is not None and not answer.death.is_killed]
    cause = next(iter([*deaths, *(answer for answer in answers if answer.outcome in ("raised", "died"))]), None)
    if reason == "interrupt" and all(answer.outcome == "done" for answer in answers):
        return None  # the code has handled the interrupt, and ended
    if reason == "interrupt":
        return with_traceback(KeyboardInterrupt(), [f"KeyboardInterrupt: {_describe_interrupt(answers)}"])
    if reason == "timeout":
        words = f"the cell ran longer than its timeout of {timeout_s:g} s: {_describe_interrupt(answers)}"
        error = with_traceback(TimeoutError(words), [f"TimeoutError: {words}"])
        setattr(error, _OF_OPTION, True)
        return error
    if reason == "deadlock":
        return PoolError(f"{_DEADLOCK}; {_describe_interrupt(answers)}")
    if cause is None:
        return None
    if cause.death is not None:
        return _make_died_error(cause.rank, cause.death, answers, logs, memory or {}, has_pool=has_pool)
    return _make_raised_error(cause, answers, remarks)


def is_option_timeout(error: BaseException) -> bool:
    """Return whether the option ``timeout`` has ended the run. The cell's code may raise TimeoutError too."""
    return getattr(error, _OF_OPTION, False)


def with_traceback(error: BaseException, lines: Sequence[str]) -> BaseException:
    """Set ``lines`` as the traceback that IPython shows of an error, and return the error."""
    error._render_traceback_ = lambda: list(lines)  # type: ignore[attr-defined]
    return error


def _describe_interrupt(answers: Sequence[RankAnswer]) -> str:
    killed = [answer.rank for answer in answers if answer.outcome == "died"]
    words = f"rank {_join(killed)} {_NOT_STOPPED}" if killed else "stopped on every rank; variables and models are kept"
    return "\n".join([words, *_describe_errors_in_handling(answers), *_describe_stacks(answers)])


def _describe_errors_in_handling(answers: Sequence[RankAnswer]) -> list[str]:
    """Return which error the code raised that handled the interrupt, on the first rank where it did."""
    failed = [answer for answer in answers if answer.outcome == "raised" and answer.reply.was_interrupted]
    if not failed:
        return []
    first = min(failed, key=lambda answer: answer.rank)
    assert first.reply.error is not None, "a rank that raised reports an error"
    return [_ERROR_IN_HANDLING.format(rank=first.rank), *first.reply.error.traceback]


def _describe_stacks(answers: Sequence[RankAnswer]) -> list[str]:
    """Return where each rank was that did not stop and was killed."""
    return [
        f"The last Python stack of rank {answer.rank}:\n{stack}"
        for answer in answers
        if answer.death is not None and answer.death.is_killed and (stack := answer.death.stack.strip())
    ]


def _make_died_error(
    rank: int,
    death: WorkerDeath,
    answers: Sequence[RankAnswer],
    logs: Mapping[int, RankLog],
    memory: Mapping[int, MemorySample],
    *,
    has_pool: bool,
) -> WorkerDied:
    dead = sorted(answer.rank for answer in answers if answer.outcome == "died")
    if death.lost_node:
        lost = [answer.rank for answer in answers if answer.death is not None and answer.death.lost_node]
        return WorkerDied(
            f"{death.lost_node}, and rank{'s' if len(lost) > 1 else ''} {_join(lost)} with it. The next cell runs on "
            "the nodes that remain, and starts with the notebook's values on every rank.",
            rank=rank,
        )
    what = (
        "A fresh worker takes its place; the next cell"
        if has_pool
        else "The process that workers are forked from has ended too; both are started again. The next cell"
    )
    parts = [
        f"rank {_join(dead)} {describe_exit(death.code, death.killed_for)} while the cell ran. "
        f"{what} starts with the notebook's values on every rank."
    ]
    if death.killed_for in ("group", "machine") and rank in memory:
        parts.append(_describe_last_memory(memory[rank]))
    if rank in logs and (tail := logs[rank].end_of_text().strip()):
        parts.append(f"Its last output:\n{tail}")
    if (stack := death.stack.strip()) and not death.is_killed:
        parts.append(f"Its last Python stack:\n{stack}")
    parts += _describe_stacks(answers)
    return WorkerDied("\n".join(parts), rank=rank)


def _describe_last_memory(sample: MemorySample) -> str:
    sizes = {
        name: getattr(sample, name) for name in ("parameters", "gradients", "optimizer", "other", "cached", "free")
    }
    listed = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size)
    return (
        f"At step {sample.step}, when it was measured last: {listed}. Use smaller batches with --accumulate, "
        "--activation-checkpointing or --strategy fsdp; `%accelerate plan` shows what would fit"
    )


def _make_raised_error(cause: RankAnswer, answers: Sequence[RankAnswer], remarks: Sequence[str]) -> BaseException:
    raised = cause.reply.error
    assert raised is not None, "a rank that raised reports an error"
    error = _rebuild_error(raised)
    same, other = [], []
    for answer in answers:
        if answer.rank != cause.rank and answer.outcome == "raised":
            reported = answer.reply.error
            assert reported is not None, "a rank that raised reports an error"
            if (reported.type, reported.message) == (raised.type, raised.message):
                same.append(answer.rank)
            else:
                other.append(f"rank {answer.rank} then raised {reported.type}: {_first_line(reported.message)}")
    if killed := [answer.rank for answer in answers if answer.outcome == "died"]:
        other.append(f"rank {_join(killed)} then {_NOT_STOPPED}")
    other += _describe_stacks(answers)
    ranks = [cause.rank, *same]
    head = "every rank raised:" if len(ranks) == len(answers) > 1 else f"rank {_join(ranks)} raised:"
    return with_traceback(error, [head, *raised.traceback, *other, *remarks])


def _rebuild_error(raised: ErrorReport) -> BaseException:
    """Return an error of the same type if this process can construct one, else a PoolError that names the type."""
    if raised.pickled is not None:
        try:
            error = pickling.load(base64.b64decode(raised.pickled), [], namespace=sys.modules["__main__"].__dict__)
            str(error)  # what shows it needs its text
        except Exception:  # the error's own reduction may raise anything; its type is named below
            error = None
        if isinstance(error, BaseException):
            return error
    kind = getattr(builtins, raised.type, None) if raised.module == "builtins" else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(raised.message)
        except TypeError:
            pass
    return PoolError(f"{raised.module}.{raised.type}: {raised.message}")


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:200]
