"""Which ranks wait forever, by their reported positions; no process runs."""

from __future__ import annotations

from typing import Any

import pytest

from accel_nb.pool.control.hang_detection import QUERY_INTERVAL_S, HangDetector
from accel_nb.pool.engine import ObservedState
from accel_nb.pool.messages import RankLocation


class Engine:
    """Sends nothing anywhere."""

    def send(self, rank: int, record: Any, payloads: Any = (), *, urgent: bool = False) -> bool:
        return True


def place(**changes: Any) -> RankLocation:
    """Where a rank stands that is inside of a collective of all ranks."""
    values: dict[str, Any] = {
        "file": "the cell", "line": 3, "text": "loss.backward()", "is_waiting": True, "is_open": True,
        "includes_all_ranks": True, "has_ended": False, "group": "0", "sequence": 28, "operation": "all_reduce",
        "sizes": [[3]],
    } | changes  # fmt: skip
    values = {"channel": values["group"], **values}
    return RankLocation(**{"entered": {values["channel"]: values["sequence"]} if values["channel"] else {}, **values})


def ended(**changes: Any) -> RankLocation:
    return place(**{"has_ended": True, "is_open": False, "is_waiting": False, "sequence": 27, **changes})


SUBGROUP = {"group": "1", "includes_all_ranks": False}
IN_SUBGROUP = place(**SUBGROUP, sequence=9, entered={"0": 27, "1": 9})


@pytest.mark.parametrize(
    ("places", "is_stuck", "said"),
    [
        ([ended(), place()], True, "rank 0 has ended and does not enter it: look for a branch"),
        (
            [ended(group=None, sequence=None), place()],
            True,
            "rank 0 has ended and does not enter it: look for a branch",
        ),
        ([ended(), place(), ended()], True, "ranks 0 and 2 have ended and do not enter it: look for a branch"),
        ([ended(sequence=28), place()], False, "does not enter it: interrupt, and look for a branch"),
        ([ended(), place(is_open=False)], False, "does not enter it: interrupt, and look for a branch"),
        ([place(**SUBGROUP), place(**SUBGROUP), ended(group=None, sequence=None)], False, "interrupt"),
        ([place(operation="broadcast"), place()], True, "ranks wait in different collectives"),
        ([place(sizes=[[4]]), place()], False, "ranks wait in different collectives"),
        ([place(entered={"0": 28, "1": 8}), IN_SUBGROUP], True, "ranks wait in different collectives"),
        ([place(entered={"0": 28, "1": 9}), IN_SUBGROUP], False, "rank 0 waits in all_reduce #28 of shape [[3]] for"),
        ([place(entered={"0": 28}), IN_SUBGROUP], False, "rank 0 waits in all_reduce #28 of shape [[3]] for rank 1"),
        ([ended(entered={"0": 27, "1": 8}), IN_SUBGROUP], True, "rank 0 has ended and does not enter it: look"),
        ([place(sequence=29), place(is_open=False, is_waiting=False)], False, "for rank 1, which is at line 3"),
    ],
)
def test_only_what_cannot_go_on_is_stuck(places, is_stuck, said):
    now, lines = [0.0], []
    doctor = HangDetector(
        Engine(),  # type: ignore[arg-type]
        1,
        len(places),
        lambda rank, line: lines.append(line),
        clock=lambda: now[0],
    )
    waiting = {rank for rank, where in enumerate(places) if not where.has_ended}
    for _ in range(6):
        now[0] += QUERY_INTERVAL_S + 0.01
        doctor.update(waiting)
        for rank, where in enumerate(places):
            doctor.record_location(rank, where)
    assert doctor.is_stuck is is_stuck
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.parametrize(
    ("has_ended", "state", "num_lines"), [(False, "R", 1), (True, "R", 0), (False, "T", 1), (True, "T", 1)]
)
def test_a_rank_that_packs_its_results_is_called_unresponsive_only_if_stopped(has_ended, state, num_lines):
    now, lines = [0.0], []
    detector = HangDetector(
        Engine(),  # type: ignore[arg-type]
        1,
        2,
        lambda rank, line: lines.append(line),
        clock=lambda: now[0],
    )
    for _ in range(6):
        now[0] += QUERY_INTERVAL_S + 0.01
        detector.update({0})
        if has_ended:
            detector.record_location(0, ended())
        detector.record_observed(ObservedState(0, state, lambda: 'File "pickling.py", line 1 in dump'))
    assert len(lines) == num_lines
