"""The values that the answers of ranks carry, separated from the answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from accel_nb.notebook.cells.call import RESULT
from accel_nb.notebook.messages import RankAnswer
from accel_nb.pool.payload import BufferPayload, close_all, find_payload


def split_results(answers: list[RankAnswer]) -> tuple[list[RankAnswer], dict[int, BufferPayload]]:
    """Separate the results of a call from the answers, and return them by rank; the caller closes them."""
    results: dict[int, BufferPayload] = {}
    for index, answer in enumerate(answers):
        if (payload := find_payload(answer.payloads, RESULT, BufferPayload)) is not None:
            results[answer.rank] = payload
            others = {name: other for name, other in answer.payloads.items() if name != RESULT}
            answers[index] = replace(answer, payloads=others)
    return answers, results


def without_returns(answers: Iterable[RankAnswer]) -> list[RankAnswer]:
    """Return the answers without returned values, so that the notebook keeps its own."""
    kept: list[RankAnswer] = []
    for answer in answers:
        close_all(answer.payloads.values())
        kept.append(replace(answer, reply=replace(answer.reply, returned=None), payloads={}))
    return kept
