"""Each case of the corpus, plainly and on workers: the outcome is the declared one.

Some cases run on two workers. ``REALWORLD=all`` runs every case, on two and on three workers; one of them:
``REALWORLD=all pytest tests/realworld -k "losses/ccc"``. ``REALWORLD_FLAGS="--strategy fsdp"`` runs them with other
flags: then each must be equal, told or refused (see `Setting`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from tests.realworld.case import Case, read_cases
from tests.realworld.notebook import Notebook, Setting
from tests.realworld.verdict import complaint, judge


@pytest.mark.timeout(300)
class Corpus:
    """The cases of some groups, in one kernel."""

    groups: tuple[str, ...]

    def test_a_case_ends_as_declared(
        self,
        notebook: Notebook,
        setting: Setting,
        case: Case,
        workers: int,
        record_property: Callable[[str, object], None],
    ) -> None:
        for package in case.needs:
            if find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        case = case.on(workers)
        plain = notebook.plain(case)
        if plain.failed is not None and not setting.is_declared:
            pytest.skip(f"{case.name} does not work on one device in this setting")
        name, message = (plain.failed.error if plain.failed else None) or ("", "")
        if name == "ModuleNotFoundError" and "ENVIRONMENT_NAME" in os.environ:
            pytest.skip(f"{case.name} needs a module that this environment lacks: {message}")
        assert plain.failed is None, f"{case.name} fails plainly:\n{plain.failed.traceback}"
        verdict = judge(case, plain, notebook.on_workers(case, workers), setting.tolerance)
        record_property("realworld", verdict.kind)
        record_property("reasons", "\n".join([*verdict.reasons, *(f"said: {line}" for line in verdict.said)]))
        problem = complaint(case, verdict, setting.is_declared)
        assert problem is None, problem


class TestBasics(Corpus):
    groups = ("data", "losses", "metric", "supervised")


class TestModels(Corpus):
    groups = ("generative", "modules", "sequence")


class TestTraining(Corpus):
    groups = ("deepspeed", "functional", "optim", "raw", "rl", "science", "sharded")


class TestNotebooks(Corpus):
    groups = ("stories", "trainers")


def test_every_group_of_cases_is_run() -> None:
    found = [group for kind in Corpus.__subclasses__() for group in kind.groups]
    assert sorted(found) == sorted({case.group for case in read_cases()})
