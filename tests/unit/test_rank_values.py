"""Tests of the digests by which values that differ among ranks are found."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch

from accel_nb.notebook.worker.rank_values import digest_values


def _digests(value: Any, *, with_numbers: bool = True) -> dict[str, int]:
    return digest_values({"value": value}, ["value", "absent"], with_numbers=with_numbers)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("runs/1", "runs/2"),
        (Path("a"), Path("b")),
        (UUID(int=1), UUID(int=2)),
        (1.5, 2.5),
        ({"folder": ["a", Path("b")]}, {"folder": ["a", Path("c")]}),
        (SimpleNamespace(run="a"), SimpleNamespace(run="b")),
    ],
)
def test_differing_values_have_different_digests(one: Any, other: Any) -> None:
    assert _digests(one) != _digests(other)
    assert _digests(one) == _digests(one)


def test_numbers_can_be_left_out() -> None:
    assert _digests({"loss": 1.0, "run": "a"}, with_numbers=False) == _digests(
        {"loss": 2.0, "run": "a"}, with_numbers=False
    )
    assert _digests([1.0], with_numbers=False) == {}


def test_other_values_are_not_compared() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (torch.ones(2), torch.nn.Linear(1, 1), cycle, deque(), list(range(5000)), str):
        assert _digests(value) == {}


def test_the_order_of_a_set_does_not_count() -> None:
    assert _digests({"a", "b", "c"}) == _digests({"c", "b", "a"})
