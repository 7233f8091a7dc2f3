"""Each case of the corpus, plainly and on workers: the outcome is the declared one.

The fast half runs on two workers. ``REALWORLD=all`` runs every case, on two and on three workers; one of them:
``REALWORLD=all pytest tests/realworld -k "losses/ccc"``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from tests.realworld.case import Case, read_cases
from tests.realworld.notebook import Notebook
from tests.realworld.verdict import complaint, judge


@pytest.mark.timeout(300)
class Corpus:
    """The cases of some groups, in one kernel."""

    groups: tuple[str, ...]

    def test_a_case_ends_as_declared(
        self, notebook: Notebook, case: Case, workers: int, record_property: Callable[[str, object], None]
    ) -> None:
        for package in case.needs:
            if find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        case = case.on(workers)
        verdict = judge(case, notebook.plain(case), notebook.on_workers(case, workers))
        record_property("realworld", verdict.kind)
        problem = complaint(case, verdict)
        assert problem is None, problem


class TestBasics(Corpus):
    groups = ("data", "supervised")


class TestLosses(Corpus):
    groups = ("losses", "metric")


class TestModels(Corpus):
    groups = ("generative", "modules", "sequence")


class TestTraining(Corpus):
    groups = ("functional", "optim", "raw", "rl", "science", "sharded")


class TestNotebooks(Corpus):
    groups = ("stories", "trainers")


def test_every_group_of_cases_is_run() -> None:
    found = [group for kind in Corpus.__subclasses__() for group in kind.groups]
    assert sorted(found) == sorted({case.group for case in read_cases()})
