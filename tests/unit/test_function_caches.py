"""Which results in the caches of functions code can change."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from accel_nb.pool.sync.paths.function_caches import has_changeable_results


@pytest.mark.parametrize("maxsize", [None, 8])
@pytest.mark.parametrize("results", [[{"a": 1}], [1, {"a": 1}], [{}, 1], [[1]], [(1, [2])]])
def test_a_container_in_a_cache_can_be_changed(results: list[Any], maxsize: int | None) -> None:
    assert has_changeable_results(_filled(results, maxsize))


@pytest.mark.parametrize("maxsize", [None, 8, 0])
@pytest.mark.parametrize("results", [[], [1, "text"], [(1, 2)], [None]])
def test_numbers_and_texts_cannot_be_changed(results: list[Any], maxsize: int | None) -> None:
    assert not has_changeable_results(_filled(results, maxsize))


def _filled(results: list[Any], maxsize: int | None) -> Any:
    @functools.lru_cache(maxsize=maxsize)
    def get(place: int) -> Any:
        return results[place]

    for place in range(len(results)):
        get(place)
    return get
