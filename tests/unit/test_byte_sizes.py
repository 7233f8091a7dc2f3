"""Sizes in bytes, read from text and written as text."""

from __future__ import annotations

import pytest

from accel_nb.config.byte_sizes import read_bytes, size_text
from accel_nb.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"), [("10GB", 10**10), ("1.5 GiB", 3 << 29), ("12", 12), (0, 0), ("1kb", 1000), ("1GiB", 2**30)]
)
def test_sizes_are_read(text: int | str, nbytes: int) -> None:
    assert read_bytes(text, "x") == nbytes


@pytest.mark.parametrize("wrong", [-1, True, "ten", "10 parsecs", None, 1.5, "-1GB", "nan"])
def test_sizes_that_are_none_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"x is .*write bytes"):
        read_bytes(wrong, "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1000 * 1024, "0.98 MiB"), (2**30, "1.00 GiB"), (300 * 2**30, "300 GiB")],
)
def test_sizes_are_short(size: int, text: str) -> None:
    assert size_text(size) == text
