"""Requests to all workers, with the interrupts and the SIGTERM that arrive while they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from accel_nb.notebook.messages import RankAnswer, read_answer
from accel_nb.notebook.session.interrupts import count_interrupts
from accel_nb.pool.control.coordination import ActionQueue
from accel_nb.pool.control.stop_escalation import RankResult, Reason
from accel_nb.pool.payload import NO_PAYLOADS, Payloads
from accel_nb.pool.pool import POLL_S, Pool, RequestListener


class RequestOutcome(NamedTuple):
    """The answers of all ranks, and why they were stopped, if they were."""

    answers: list[RankAnswer]
    reason: Reason | None
    has_sigterm: bool
    """Whether SIGTERM arrived meanwhile, which the caller must raise again."""


def send_request(
    pool: Pool,
    task: str,
    bodies: Mapping[int, dict[str, Any]],
    listener: RequestListener,
    *,
    payloads: Payloads = NO_PAYLOADS,
    timeout_s: float | None = None,
    may_finish_step: bool = False,
    actions: ActionQueue | None = None,
    poll_s: float = POLL_S,
) -> RequestOutcome:
    """Run a task on all ranks of a pool, and return their answers.

    With ``may_finish_step`` the ranks complete their step at the first interrupt, and SIGTERM counts as one.
    """
    queue = actions or ActionQueue()
    with count_interrupts(terminations=may_finish_step) as interrupts:
        answers, reason = pool.run(
            task,
            bodies,
            listener,
            payloads=payloads,
            num_interrupts=lambda: interrupts.count + queue.num_interrupts,
            timeout_s=timeout_s,
            may_finish_step=may_finish_step,
            actions=queue,
            poll_s=poll_s,
        )
    return RequestOutcome([read_answer(answer) for answer in answers], reason, interrupts.has_sigterm)


class SilentListener:
    """A listener for requests without output."""

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        """Do nothing."""

    def on_message(self, rank: int, topic: str, body: dict[str, Any]) -> None:
        """Do nothing."""

    def on_events(self, events: Sequence[Any]) -> None:
        """Do nothing."""

    def on_result(self, answer: RankResult) -> None:
        """Do nothing."""

    def tick(self) -> None:
        """Do nothing."""
