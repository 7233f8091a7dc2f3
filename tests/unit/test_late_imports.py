from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_nb.accelerator.plain_cells.replacements.late_imports import observed_imports

NAME = "accel_nb_test_late_module"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1")
    yield path
    sys.modules.pop(NAME, None)


def imported() -> int:
    return importlib.import_module(NAME).value


def test_an_import_is_observed_once(module):
    calls: list[int] = []
    with observed_imports([NAME], lambda: calls.append(sys.modules[NAME].value)):
        assert imported() == imported() == 1
        assert importlib.util.find_spec(NAME) is not None
    assert calls == [1]


def test_an_import_after_a_search_for_the_module_is_observed(module):
    calls: list[int] = []
    with observed_imports([NAME], lambda: calls.append(1)):
        assert importlib.util.find_spec(NAME) is not None
        assert not calls
        imported()
    assert calls == [1]


def test_an_import_after_a_failed_one_is_observed(module):
    calls: list[int] = []
    with observed_imports([NAME], lambda: calls.append(1)):
        module.write_text("raise ImportError('not yet')  # a longer text")
        with pytest.raises(ImportError, match="not yet"):
            imported()
        assert not calls
        module.write_text("value = 1")
        imported()
    assert calls == [1]


def test_a_module_that_is_absent_at_first_is_observed(module):
    text = module.read_text()
    module.unlink()
    calls: list[int] = []
    with observed_imports([NAME], lambda: calls.append(1)):
        assert importlib.util.find_spec(NAME) is None
        module.write_text(text)
        importlib.invalidate_caches()
        imported()
    assert calls == [1]
