"""Translation of the workers' answers into the exception that the kernel raises, with its traceback."""

from __future__ import annotations

import base64
import builtins
import sys
from collections.abc import Mapping, Sequence

from accel_nb.config.byte_sizes import size_text
from accel_nb.config.message_text import ranks_text
from accel_nb.errors import PoolError, WorkerDied
from accel_nb.notebook.messages import ErrorReport, RankAnswer
from accel_nb.notebook.output.rank_logs import RankLog
from accel_nb.pool.control.stop_escalation import Reason, WorkerDeath, describe_exit
from accel_nb.pool.sync.stream import pickling
from accel_nb.telemetry.events import MemorySample

_FRESH_START = "the next cell starts with the notebook's values"
_IS_OPTION_TIMEOUT = "_accel_nb_option_timeout"
_ERROR_IN_HANDLING = (
    "The code that handled the interrupt raised on rank {rank} what follows. Ranks are interrupted after different "
    "steps, and exchange nothing any more in the cell: train in the next one."
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
    closing_lines: Sequence[str] = (),
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
        closing_lines: lines to show below the traceback.
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
        setattr(error, _IS_OPTION_TIMEOUT, True)
        return error
    if reason == "deadlock":
        return PoolError(f"{_DEADLOCK}; {_describe_interrupt(answers)}")
    if cause is None:
        return None
    if cause.death is not None:
        return _make_died_error(cause.rank, cause.death, answers, logs, memory or {}, has_pool=has_pool)
    return _make_raised_error(cause, answers, closing_lines)


def is_option_timeout(error: BaseException) -> bool:
    """Return whether the option ``timeout`` has ended the run. The cell's code may raise TimeoutError too."""
    return getattr(error, _IS_OPTION_TIMEOUT, False)


def with_traceback(error: BaseException, lines: Sequence[str]) -> BaseException:
    """Set ``lines`` as the traceback that IPython shows of an error, and return the error."""
    error._render_traceback_ = lambda: list(lines)  # type: ignore[attr-defined]
    return error


def _describe_interrupt(answers: Sequence[RankAnswer]) -> str:
    killed = [answer.rank for answer in answers if answer.outcome == "died"]
    words = "stopped on every rank; variables and models are kept"
    if killed:
        words = f"{ranks_text(killed)} {_not_stopped(killed)}; {_FRESH_START}"
    return "\n".join([words, *_describe_errors_in_handling(answers), *_describe_stacks(answers)])


def _describe_errors_in_handling(answers: Sequence[RankAnswer]) -> list[str]:
    """Return which error the code raised that handled the interrupt, on the first rank where it did."""
    failed = [answer for answer in answers if answer.outcome == "raised" and answer.reply.was_interrupted]
    if not failed:
        return []
    first = min(failed, key=lambda answer: answer.rank)
    assert first.reply.error is not None, "a rank that raised reports an error"
    return [_ERROR_IN_HANDLING.format(rank=first.rank), *first.reply.error.traceback]


def _not_stopped(killed: Sequence[int]) -> str:
    return f"did not stop and {'were' if len(killed) > 1 else 'was'} ended"


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
    if death.lost_node:
        lost = [answer.rank for answer in answers if answer.death is not None and answer.death.lost_node]
        return WorkerDied(
            f"{death.lost_node}, and {ranks_text(lost)} with it. The next cell runs on "
            "the nodes that remain, and starts with the notebook's values on every rank.",
            rank=rank,
        )
    deaths = [answer for answer in answers if answer.death is not None]
    replaced = "Fresh workers take their place" if len(deaths) > 1 else "A fresh worker takes its place"
    what = (
        f"{replaced}; the next cell"
        if has_pool
        else "The process that workers are forked from has ended too; both are started again. The next cell"
    )
    parts = [f"{_describe_deaths(rank, death, deaths)}. {what} starts with the notebook's values on every rank."]
    if death.killed_for in ("group", "machine") and rank in memory:
        parts.append(_describe_last_memory(memory[rank]))
    if rank in logs and (tail := logs[rank].end_of_text().strip()):
        parts.append(f"The last output of rank {rank}:\n{tail}")
    if (stack := death.stack.strip()) and not death.is_killed:
        parts.append(f"The last Python stack of rank {rank}:\n{stack}")
    parts += _describe_stacks(answers)
    return WorkerDied("\n".join(parts), rank=rank)


def _describe_deaths(rank: int, death: WorkerDeath, answers: Sequence[RankAnswer]) -> str:
    """Return how the ``rank`` that ended first did, and the other ranks whose processes have ended."""
    ways: dict[str, list[int]] = {}
    killed: list[int] = []
    for answer in answers:
        if answer.death is None or answer.rank == rank:
            continue
        if answer.death.is_killed:
            killed.append(answer.rank)
        else:
            way = describe_exit(answer.death.code, answer.death.killed_for)
            ways.setdefault(way, []).append(answer.rank)
    own = describe_exit(death.code, death.killed_for)
    same = ways.pop(own, [])
    parts = [f"rank {rank} {own} while the cell ran" + (f", {ranks_text(same)} too" if same else "")]
    parts += [f"rank {other} {way}" for way, others in ways.items() for other in sorted(others)]
    if killed:
        parts.append(f"{ranks_text(killed)} then {_not_stopped(killed)}")
    return "; ".join(parts)


def _describe_last_memory(sample: MemorySample) -> str:
    sizes = {
        name: getattr(sample, name) for name in ("parameters", "gradients", "optimizer", "other", "cached", "free")
    }
    listed = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size)
    return (
        f"At step {sample.step}, when it was measured last: {listed}. Use smaller batches with --accumulate, "
        "--activation-checkpointing or --strategy fsdp; `%accelerate plan` shows what would fit"
    )


def _make_raised_error(cause: RankAnswer, answers: Sequence[RankAnswer], closing_lines: Sequence[str]) -> BaseException:
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
        other.append(f"{ranks_text(killed)} then {_not_stopped(killed)}; {_FRESH_START}")
    other += _describe_stacks(answers)
    ranks = [cause.rank, *same]
    head = "every rank raised:" if len(ranks) == len(answers) > 1 else f"{ranks_text(ranks)} raised:"
    return with_traceback(error, [head, *raised.traceback, *other, *closing_lines])


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


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:200]
