"""Cells that call ``hash``, whose results for text differ between processes."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import pytest

from accel_nb.notebook.session.text_hashes import describe_hashes


def _bucket(word: str) -> int:
    return hash(word) % 8


def _length(word: str) -> int:
    return len(word)


@dataclass(frozen=True)
class _Options:
    rate: float


class _Word:
    def __init__(self, text: str) -> None:
        self.text = text

    def __hash__(self) -> int:
        return hash(self.text)


@pytest.mark.parametrize("source", ["i = hash(word)", "buckets = list(map(hash, words))"])
def test_a_call_in_the_cell_is_said(source: str) -> None:
    assert "calls hash" in describe_hashes(ast.parse(source), [])[0]


def test_a_call_in_a_function_that_the_cell_may_run_is_said() -> None:
    assert "calls hash" in describe_hashes(ast.parse("train()"), [_length.__code__, _bucket.__code__])[0]


@pytest.mark.parametrize("source", ["a.hash(word)", "class A:\n    def __hash__(self): return hash(self.text)"])
def test_other_hashes_are_not_said(source: str) -> None:
    codes = [_length.__code__, _Options.__hash__.__code__, _Word.__hash__.__code__]
    assert not describe_hashes(ast.parse(source), codes)
