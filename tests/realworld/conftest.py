"""A kernel for all cases that are fast, or for each set of groups where every case is run; and the cases."""

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


def _runs_all() -> bool:
    return os.environ.get("REALWORLD") == "all"


@pytest.fixture(scope=lambda **_: "class" if _runs_all() else "module")  # the few cases take less than a start
def notebook(tmp_path_factory: pytest.TempPathFactory, setting: Setting) -> Iterator[Notebook]:
    """A kernel with the extension loaded, which the cases of a class or all of them share."""
    with running_kernel() as kernel:
        output = kernel.run("%load_ext accel_nb")
        assert output.error is None, output.traceback
        yield Notebook(kernel, tmp_path_factory.mktemp("realworld"), setting)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each case of a class's groups: some on two workers, or with ``REALWORLD=all`` all, on three too."""
    if "case" not in metafunc.fixturenames:
        return
    assert metafunc.cls is not None
    runs_all = _runs_all()
    found = [
        pytest.param(case, workers, id=f"{case.name}-{workers}")
        for case in read_cases()
        for workers in ((2, 3) if runs_all else (2,))
        if case.group in metafunc.cls.groups and (runs_all or case.is_fast)
    ]
    metafunc.parametrize(("case", "workers"), found)
