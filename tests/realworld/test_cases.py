"""Each case of the corpus, plainly and on workers: the outcome is the declared one.

The fast half runs on two workers. ``REALWORLD=all`` runs every case, on two and on three workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from tests.realworld.case import Case, read_cases
from tests.realworld.notebook import Notebook
from tests.realworld.verdict import complaint, judge

_RUNS_ALL = os.environ.get("REALWORLD") == "all"
_WORKERS = (2, 3) if _RUNS_ALL else (2,)


def _params() -> Iterator[object]:
    for case in read_cases():
        if _RUNS_ALL or case.is_fast:
            for workers in _WORKERS:
                yield pytest.param(case.group, case, workers, id=f"{case.name}-{workers}")


@pytest.mark.parametrize(("notebook", "case", "workers"), [*_params()], indirect=["notebook"])
def test_a_case_ends_as_declared(
    notebook: Notebook, case: Case, workers: int, record_property: Callable[[str, object], None]
) -> None:
    for package in case.needs:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    verdict = judge(case, notebook.plain(case), notebook.on_workers(case, workers))
    record_property("realworld", verdict.kind)
    problem = complaint(case, verdict)
    assert problem is None, problem
