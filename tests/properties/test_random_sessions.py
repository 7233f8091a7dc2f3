"""Random notebook sessions: after each cell on workers the notebook is as without them, or a line says what differs.

A few sessions run by default. ``RANDOM_SESSIONS=1000`` runs so many. One session, with its cells:
``python -m tests.properties.sessions.run --cases 7 --source``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy
import pytest
import torch

from tests.properties.sessions.dump import Dump
from tests.properties.sessions.notebooks import Notebooks, running_notebooks
from tests.properties.sessions.run import describe
from tests.properties.sessions.session import make_session
from tests.realworld.values import Entries, differences
from tests.support.nightly import nightly

CHUNK = 8
"""How many sessions are one test."""
NUM_SESSIONS = int(os.environ.get("RANDOM_SESSIONS", "8"))


@pytest.fixture(scope="module")
def notebooks() -> Iterator[Notebooks]:
    """Two kernels that all sessions share."""
    with running_notebooks() as notebooks:
        yield notebooks


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", [0, *map(nightly, range(CHUNK, NUM_SESSIONS, CHUNK))])
def test_sessions_leave_what_one_process_leaves(notebooks: Notebooks, first: int) -> None:
    bad: list[str] = []
    num_equal = 0
    for number in range(first, first + CHUNK):
        cells = make_session(number).cells
        for found in notebooks.judge(cells):
            num_equal += found.kind == "equal"
            if found.kind in ("failed", "silent"):
                bad.append(describe(number, cells, found, with_source=True))
    assert not bad, "\n".join(bad)
    assert num_equal > 2 * CHUNK, "most cells are equal, not refused"


def test_a_session_is_the_same_each_time() -> None:
    assert make_session(5) == make_session(5)
    assert make_session(5) != make_session(6)


def test_a_dump_shows_what_is_one_object_and_what_shares_memory() -> None:
    def dump(**names: object) -> Entries:
        return Dump((), names).collect()

    held, array = [1], numpy.zeros(4)
    assert differences(dump(a=held, b=held), dump(a=[1], b=[1]))
    assert differences(dump(a=array, b=array[1:]), dump(a=array, b=array[1:].copy()))
    assert differences(dump(a=torch.zeros(2)), dump(a=torch.zeros(2, requires_grad=True)))
    other = [1]
    assert not differences(dump(a=held, b=[held]), dump(a=other, b=[other]))
