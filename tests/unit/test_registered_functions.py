"""Filters and formatters that stay in the process in which the user has registered them are named once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from IPython.core.formatters import DisplayFormatter

from accel_nb.notebook.session import registered_functions
from accel_nb.notebook.session.registered_functions import RegisteredFunctions


class Shown:
    """A class of the user."""


def keep_all(record: logging.LogRecord) -> bool:
    return True


def as_html(value: Shown) -> str:
    return "<b>shown</b>"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("filtered")
    yield found
    found.filters.clear()


@pytest.fixture
def displays(monkeypatch) -> DisplayFormatter:
    for function in (keep_all, as_html):
        monkeypatch.setattr(function, "__module__", "__main__")
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    monkeypatch.setattr(registered_functions, "get_ipython", lambda: shell)
    return shell.display_formatter


@pytest.mark.parametrize("is_worker", [False, True])
def test_what_the_user_registers_is_named_once(logger: logging.Logger, displays: DisplayFormatter, is_worker: bool):
    found = RegisteredFunctions(knows_present=is_worker)
    assert found.describe_new(is_worker=is_worker) == []
    logger.addFilter(keep_all)
    logger.addFilter(logging.Filter("filtered.part"))
    displays.formatters["text/html"].for_type(Shown, as_html)
    lines = found.describe_new(is_worker=is_worker)
    place = "which the cell has registered, has an effect in %%accelerate cells only"
    place = place if is_worker else "which the notebook has registered, has no effect on the workers"
    labels = [
        "the filter keep_all of the logger 'filtered'",
        "the filter Filter of the logger 'filtered'",
        "the formatter of Shown as text/html",
    ]
    assert [line.partition(":")[0] for line in lines] == [f"{label}, {place}" for label in labels]
    assert found.describe_new(is_worker=is_worker) == []


def test_what_libraries_register_is_not_named(logger: logging.Logger, displays: DisplayFormatter):
    found = RegisteredFunctions(knows_present=False)
    logger.addFilter(logging.getLogger("other").filter)
    displays.formatters["text/html"].for_type(Shown, str)
    assert found.describe_new(is_worker=False) == []


def test_what_a_worker_has_at_the_start_of_a_cell_is_not_named(logger: logging.Logger, displays: DisplayFormatter):
    logger.addFilter(keep_all)
    assert RegisteredFunctions(knows_present=True).describe_new(is_worker=True) == []
