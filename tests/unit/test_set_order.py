"""Sets of text whose order a cell uses on the workers."""

from __future__ import annotations

import ast

import pytest

from accel_nb.notebook.session.set_order import SetOrder


def _describe(source: str, **names: object) -> list[str]:
    order = SetOrder()
    order.record_sent(names, names)
    return order.describe(ast.parse(source), list(names))


@pytest.mark.parametrize(
    "source",
    [
        "index = {word: i for i, word in enumerate(vocabulary)}",
        "for word in vocabulary: print(word)",
        "words = [word for word in vocabulary]",
        "words = list(vocabulary)",
        "words = [*vocabulary, 'end']",
        "text = ' '.join(vocabulary)",
    ],
)
def test_an_order_that_the_cell_uses_is_said(source: str) -> None:
    assert "vocabulary" in _describe(source, vocabulary={"a", "b"})[0]


@pytest.mark.parametrize(
    "source",
    [
        "words = sorted(vocabulary)",
        "words = sorted(list(vocabulary))",
        "is_known = word in vocabulary; number = len(vocabulary)",
        "lower = {word.lower() for word in vocabulary}",
        "words = list(others)",
    ],
)
def test_nothing_is_said_where_no_order_is_used(source: str) -> None:
    assert not _describe(source, vocabulary={"a", "b"})


def test_only_sets_of_several_texts_are_meant() -> None:
    source = "words = list(vocabulary)"
    assert not _describe(source, vocabulary={"a"})
    assert not _describe(source, vocabulary={1, 2})
    assert not _describe(source, vocabulary=["a", "b"])


def test_a_set_that_came_from_the_workers_has_the_order_that_cells_on_them_saw() -> None:
    order = SetOrder()
    order.record_sent(["vocabulary"], {"vocabulary": {"a", "b"}})
    order.record_returned(["vocabulary"])
    assert not order.describe(ast.parse("words = list(vocabulary)"), ["vocabulary"])
