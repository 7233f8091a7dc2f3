from types import MappingProxyType

import numpy as np
import pytest
import torch

from accel_nb.accelerator import Accelerator
from accel_nb.data.split import split_inputs
from accel_nb.errors import MisuseError


def parts(inputs, size, pad=False):
    return [split_inputs(inputs, rank, size, pad=pad) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 2, 4, 7])
def test_parts_make_up_the_whole_and_padding_makes_them_equal(length, size):
    items = list(range(length))
    found = parts(items, size)
    assert [item for part in found for item in part] == items
    assert max(map(len, found)) - min(map(len, found)) <= 1

    padded = parts(items, size, pad=True)
    assert {len(part) for part in padded} == {-(-length // size)}
    for part, longer in zip(found, padded, strict=True):
        assert longer == part + [length - 1] * (len(longer) - len(part))


def test_every_kind_keeps_its_type_and_the_input_is_left_alone():
    inputs = {
        "l": [1, 2, 3],
        "t": (1, 2, 3),
        "x": torch.arange(6).view(3, 2),
        "a": np.arange(3),
        "s": "abc",
        "r": range(3),
    }
    before = dict(inputs)

    first, second = parts(inputs, 2)

    assert inputs.keys() == before.keys()
    assert all(inputs[key] is before[key] for key in inputs)
    assert (first["l"], second["l"]) == ([1, 2], [3])
    assert (first["t"], second["t"]) == ((1, 2), (3,))
    assert second["x"].tolist() == [[4, 5]]
    assert second["a"].tolist() == [2]
    assert (first["s"], second["r"]) == ("ab", range(2, 3))
    del inputs["s"], inputs["r"]
    padded = split_inputs(MappingProxyType(inputs), 1, 2, pad=True)
    assert (padded["l"], padded["t"]) == ([3, 3], (3, 3))
    assert padded["x"].tolist() == [[4, 5], [4, 5]]
    assert padded["a"].tolist() == [2, 2]


class Selecting:
    """A container whose ``select`` returns its argument."""

    def __len__(self):
        return 3

    def __getitem__(self, key):
        return [10, 20, 30][key]

    def select(self, indices):
        return indices


def test_rows_of_a_dataset_are_selected():
    dataset = type("Dataset", (Selecting,), {"__module__": "datasets.arrow_dataset"})
    for kind in (dataset, type("Own", (dataset,), {})):
        assert parts(kind(), 2) == [[0, 1], [2]]
        assert parts(kind(), 2, pad=True) == [[0, 1], [2, 2]]


def test_select_of_another_type_is_not_called():
    """As of a data frame of polars, which selects columns and literals."""
    assert parts(Selecting(), 2) == [[10, 20], [30]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (3, "a int cannot be divided"),
        ({1, 2}, "a set cannot be divided"),
        (torch.tensor(1.0), "scalar"),
        ({"a": [1], "b": [1, 2]}, r"equally long: \{'a': 1, 'b': 2\}"),
    ],
)
def test_what_cannot_be_divided_is_refused(inputs, message):
    with pytest.raises(MisuseError, match=message):
        split_inputs(inputs, 0, 2)


def test_what_cannot_be_padded_is_refused():
    class Rows:
        def __len__(self):
            return 3

        def __getitem__(self, key):
            return self

    for inputs in (Rows(), memoryview(b"abc")):
        for rank in range(2):
            with pytest.raises(MisuseError, match=f"a {type(inputs).__name__} cannot be padded"):
                split_inputs(inputs, rank, 2, pad=True)


def test_a_range_is_padded_as_a_list():
    assert parts(range(5), 2, pad=True) == [[0, 1, 2], [3, 4, 4]]
    assert parts(range(4), 2, pad=True) == [[0, 1], [2, 3]]
    assert parts(range(5), 2) == [range(3), range(3, 5)]


def test_one_process_gets_everything():
    items = [1, 2]
    with Accelerator(cpu=True).split_between_processes(items) as mine:
        assert mine == items
        mine.append(3)
    assert items == [1, 2]
