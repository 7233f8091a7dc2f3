"""Arrays that are mapped from files: their copies are mapped from the same places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from accel_nb.pool.sync.stream.pickling import digest
from accel_nb.pool.sync.stream.sections import dump_sections, load_sections
from accel_nb.runtime.process.environment import patch_environment


def copied(value: Any) -> tuple[Any, int]:
    """Return a copy, and the size of the data that travelled beside the stream."""
    stream, buffers = dump_sections({"value": value}, namespace={}, shared={}, kept_names=())
    values, errors = load_sections(stream, buffers, namespace={})
    assert errors == {}
    return values["value"], sum(buffer.nbytes for buffer in buffers)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    numpy.arange(40.0).tofile(tmp_path / "numbers.bin")
    return tmp_path / "numbers.bin"


def test_what_can_only_be_read_is_sent_as_its_place(path: Path) -> None:
    whole = numpy.memmap(path, mode="r", offset=8 * 4, shape=(6, 6))
    for array in (whole, whole[2:5], whole.T, whole[3]):
        copy, size = copied(array)
        assert size == 0
        assert type(copy) is numpy.memmap
        assert (copy.mode, copy.dtype, copy.strides) == ("r", array.dtype, array.strides)
        numpy.testing.assert_array_equal(copy, array)


def test_the_first_rank_writes_to_the_file_and_the_others_to_copies(path: Path) -> None:
    numbers = numpy.memmap(path, mode="r+", dtype=numpy.float64)
    with patch_environment(rank="1"):
        later, _ = copied(numbers)
    first, _ = copied(numbers[10:20])
    before = digest(numbers, namespace={}, shared={})
    later[10] = -1
    assert (numbers[10], first[0]) == (10, 10)
    first[0] = -2
    assert (numbers[10], later[10]) == (-2, -1)
    assert digest(numbers, namespace={}, shared={}) != before


@pytest.mark.parametrize("case", ["strided", "changed here only", "without its file"])
def test_other_arrays_are_sent_as_data(path: Path, case: str) -> None:
    array = numpy.memmap(path, mode="c" if case == "changed here only" else "r+", dtype=numpy.float64)
    if case == "strided":
        array = array[::3]
    if case == "changed here only":
        array[0] = 7
    if case == "without its file":
        path.unlink()
    copy, _ = copied(array)
    numpy.testing.assert_array_equal(copy, array)
    copy[0] = 9
    assert array[0] != 9
