"""A kernel for each set of groups, and the cases of these groups."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.realworld.case import read_cases
from tests.realworld.notebook import Notebook, Setting, read_setting
from tests.support.kernel import running_kernel


@pytest.fixture(scope="session")
def setting() -> Setting:
    """What all cases have in common."""
    return read_setting()


@pytest.fixture(scope="class")
def notebook(tmp_path_factory: pytest.TempPathFactory, setting: Setting) -> Iterator[Notebook]:
    """A kernel with the extension loaded, which the cases of a class share."""
    with running_kernel() as kernel:
        output = kernel.run("%load_ext accel_nb")
        assert output.error is None, output.traceback
        yield Notebook(kernel, tmp_path_factory.mktemp("realworld"), setting)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each case of a class's groups: some on two workers, or with ``REALWORLD=all`` all, on three too."""
    if "case" not in metafunc.fixturenames:
        return
    assert metafunc.cls is not None
    runs_all = os.environ.get("REALWORLD") == "all"
    found = [
        pytest.param(case, workers, id=f"{case.name}-{workers}")
        for case in read_cases()
        for workers in ((2, 3) if runs_all else (2,))
        if case.group in metafunc.cls.groups and (runs_all or case.is_fast)
    ]
    metafunc.parametrize(("case", "workers"), found)
