"""Sets whose order a cell uses on the workers."""

from __future__ import annotations

import ast
import itertools
from types import SimpleNamespace

import pytest

from accel_nb.notebook.session.set_order import SetOrder


def _describe(source: str, **names: object) -> list[str]:
    order = SetOrder(has_same_hashes=False)
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


@pytest.mark.parametrize(
    "source",
    [
        "characters = list(set(text))",
        "index = {word: i for i, word in enumerate(set(text.split()))}",
        "words = set(word for word in text)\nfor word in words: print(word)",
        "words = {word for word in text}; index = dict(enumerate(words))",
    ],
)
@pytest.mark.parametrize("text", ["a b", ["a", "b"], ("a", 1), [["a", "b"], ["c"]], {"a": 1}, [{"a": 1}]])
def test_an_order_of_sets_that_the_cell_makes_of_text_of_the_notebook_is_said(source: str, text: object) -> None:
    assert "text" in _describe(source, text=text)[0]


@pytest.mark.parametrize(
    "source",
    [
        "characters = sorted(list(set(text)))",
        "number = len(set(text)); words = set(text); is_known = 'a' in words",
        "characters = list(text)",
    ],
)
def test_nothing_is_said_of_sets_of_text_without_order(source: str) -> None:
    assert not _describe(source, text="a b")


def test_nothing_is_said_of_sets_that_the_cell_makes_of_numbers() -> None:
    assert not _describe("labels = list(set(values))", values=[2, 1])


def test_only_sets_of_several_texts_are_meant() -> None:
    source = "words = list(vocabulary)"
    assert not _describe(source, vocabulary={"a"})
    assert not _describe(source, vocabulary=set(range(20)))
    assert not _describe(source, vocabulary=["a", "b"])


def test_a_set_that_came_from_the_workers_has_the_order_that_cells_on_them_saw() -> None:
    order = SetOrder(has_same_hashes=False)
    order.record_sent(["vocabulary"], {"vocabulary": {"a", "b"}})
    order.record_returned(["vocabulary"])
    assert not order.describe(ast.parse("words = list(vocabulary)"), ["vocabulary"])


def _reordered() -> set[int]:
    """Return a set of two numbers that collide, whose copy has the other order."""
    for found in map(set, itertools.permutations(range(64), 2)):
        order = list(found)
        if list(set(order)) != order:
            return found
    raise AssertionError("no two numbers collide")


class _Client:
    def __init__(self) -> None:
        self.indices = _reordered()


_Client.__module__ = "__main__"  # as that of a class of the notebook


@pytest.mark.parametrize(
    "value",
    [
        _reordered(),
        frozenset(_reordered()),
        {client: _reordered() for client in range(100)},
        [(0, _reordered())],
        _Client(),
    ],
)
def test_a_set_of_numbers_that_a_copy_reorders_is_said_wherever_it_is(value: object) -> None:
    (line,) = _describe("train(clients)", clients=value)
    assert "sets of numbers in clients have another order" in line


@pytest.mark.parametrize("value", [[set(range(20))], [{"a", "b"}], [SimpleNamespace(indices=_reordered())], None, 1.0])
def test_other_values_are_not_said(value: object) -> None:
    assert not _describe("train(clients)", clients=value)


def test_a_set_of_numbers_that_came_from_the_workers_is_not_said() -> None:
    order = SetOrder(has_same_hashes=False)
    order.record_sent(["clients"], {"clients": _reordered()})
    order.record_returned(["clients"])
    assert not order.describe(ast.parse("train(clients)"), ["clients"])


def test_with_one_seed_of_hashes_only_sets_that_a_copy_reorders_are_meant() -> None:
    order = SetOrder(has_same_hashes=True)
    texts = [str(number) for number in range(1000)]
    filled = next(found for found in map(_filled_otherwise, texts) if _is_reordered(found))
    kept = next(found for found in ({text, "a"} for text in texts) if not _is_reordered(found))
    values = {"vocabulary": kept, "filled": filled, "text": texts}
    order.record_sent(values, values)
    lines = order.describe(ast.parse("list(vocabulary), list(filled), list(set(text))"), list(values))
    assert [line.partition(" have")[0] for line in lines] == ["sets in filled"]


def _filled_otherwise(text: str) -> set[str]:
    """Return a set whose order is that of more items than it has."""
    found = {text, *map(str, range(200))}
    for number in range(190):
        found.discard(str(number))
    return found


def _is_reordered(found: set[str]) -> bool:
    order = list(found)
    return list(set(order)) != order
