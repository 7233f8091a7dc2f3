"""The search for a batch size under the other package's name."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from accel_nb.compat.batch_size import find_executable_batch_size


def train(tried: list[int], size: int, limit: int = 6) -> int:
    tried.append(size)
    if size > limit:
        raise RuntimeError("CUDA out of memory. Tried to allocate a lot")
    return size


def test_the_first_parameter_has_any_name_and_the_size_is_kept_for_the_next_call() -> None:
    tried: list[int] = []
    search: Any = find_executable_batch_size(functools.partial(train, tried), starting_batch_size=8)
    assert (search(), search()) == (6, 6)
    assert tried == [8, 7, 6, 6]


def test_a_function_without_arguments_returns_the_next_size() -> None:
    tried, sizes = [], iter([4, 2, 0])

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: next(sizes))
    def run(number: int, limit: int) -> int:
        return train(tried, number, limit)

    assert run(limit=2) == 2
    assert tried == [8, 4, 2]
    with pytest.raises(RuntimeError, match="none smaller to try"):
        run(limit=1)
    with pytest.raises(TypeError, match="leave it out of the call"):
        run(8, 1)
