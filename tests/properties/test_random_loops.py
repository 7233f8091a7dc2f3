"""Random training loops end equal, told or refused on workers; never silently different, and never with another error.

A hundred programs run by default, half of them on two and half on three workers. ``RANDOM_LOOPS=3000`` runs so many,
each on both. One program, with its source: ``python -m tests.properties.run --cases 7 --source``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.properties.program import make_program
from tests.properties.run import describe
from tests.properties.verdict import BAD, Runner
from tests.properties.workers import Workers, running_workers

CHUNK = 25
"""How many programs are one test."""
MAX_NOT_EQUAL = 5
"""How many programs of a test may be told or refused."""
NUM_PROGRAMS = int(os.environ.get("RANDOM_LOOPS", "100"))
RUNS_ALL = "RANDOM_LOOPS" in os.environ


@pytest.fixture(scope="module")
def workers(one_torch_thread: None) -> Iterator[Workers]:
    """Return the processes that both sizes share."""
    with running_workers() as workers:
        yield workers


@pytest.fixture(scope="module", params=(2, 3))
def runner(request: pytest.FixtureRequest, workers: Workers) -> Runner:
    """Return a runner on two or three workers, which programs share."""
    workers.start(request.param)
    return Runner(workers)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, CHUNK))
def test_programs_are_equal_told_or_refused(runner: Runner, first: int) -> None:
    numbers = range(first, first + CHUNK) if RUNS_ALL else range(first + runner.num_workers % 2, first + CHUNK, 2)
    verdicts = [runner.judge(make_program(number), runner.num_workers) for number in numbers]
    bad = [describe(verdict) for verdict in verdicts if verdict.kind in BAD]
    assert not bad, "\n".join(bad)
    others = [describe(verdict) for verdict in verdicts if verdict.kind != "equal"]
    assert len(others) <= MAX_NOT_EQUAL * len(verdicts) / CHUNK, "\n".join(others)
