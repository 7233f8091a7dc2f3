"""Fingerprints of small arrays and tensors: which changes they show, and which they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from accel_nb.pool.sync.objects.shared_ids import shared_ids
from accel_nb.pool.sync.stream.pickling import digest


def _fingerprint(value: Any, **objects: Any) -> bytes:
    return digest(value, namespace={}, shared=shared_ids(objects))


def _records() -> list[Any]:
    return [np.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3), {"x": torch.tensor(1), "y": np.float32([2])}]


def _set_writeable(array: np.ndarray) -> None:
    array.flags.writeable = False


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "an element of an array": lambda data: data[0].__setitem__((0, 0), 7),
    "the shape of an array": lambda data: data.__setitem__(0, data[0].reshape(3, 2)),
    "the dtype of an array": lambda data: data.__setitem__(0, data[0].view(np.int64)),
    "whether an array can be written to": lambda data: _set_writeable(data[0]),
    "the order of an array's elements in memory": lambda data: data.__setitem__(0, np.asfortranarray(data[0])),
    "an element of a tensor": lambda data: data[1].data.add_(1),
    "a tensor's element through NumPy": lambda data: data[1].numpy().__setitem__((1, 2), -1),
    "the shape of a tensor": lambda data: data[1].resize_(3, 2),
    "the sign bit of a tensor": lambda data: data.__setitem__(1, torch._neg_view(data[1])),
    "whether a tensor needs a gradient": lambda data: data[1].requires_grad_(),
    "an attribute of a tensor": lambda data: setattr(data[1], "label", "cat"),
    "a tensor in a record": lambda data: data[2]["x"].add_(1),
    "an object that is there twice": lambda data: data.append(data[0]),
    "two equal objects in place of one twice": lambda data: data.append(data[0].copy()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what: str) -> None:
    data, other = _records(), _records()
    assert _fingerprint(data) == _fingerprint(data) == _fingerprint(other)
    CHANGES[what](data)
    assert _fingerprint(data) != _fingerprint(other)


def test_one_object_twice_differs_from_two_equal_ones() -> None:
    array = np.arange(3)
    assert _fingerprint([array, array]) != _fingerprint([array, array.copy()])


def test_a_view_counts_as_its_place_in_an_object_with_a_fingerprint_of_its_own() -> None:
    table = torch.rand(4, 3)
    rows = list(table)
    array = np.random.default_rng(0).random((4, 3))
    lines = list(array)
    before = _fingerprint([rows, lines], table=table, array=array)
    table += 1
    array += 1
    assert _fingerprint([rows, lines], table=table, array=array) == before
    assert _fingerprint([rows[1:], lines], table=table, array=array) != before
    assert _fingerprint([[row.clone() for row in rows], lines], table=table, array=array) != before


def test_views_of_one_memory_differ_from_equal_copies() -> None:
    table, array = torch.zeros(2, 3), np.zeros((2, 3))
    assert _fingerprint(list(table)) != _fingerprint([torch.zeros(3), torch.zeros(3)])
    assert _fingerprint(list(array)) != _fingerprint([np.zeros(3), np.zeros(3)])
    assert _fingerprint([array, torch.from_numpy(array)]) != _fingerprint([array, torch.from_numpy(array.copy())])


@pytest.mark.parametrize("num_elements", [2**13, 2**15])
def test_data_of_any_size_counts(num_elements: int) -> None:
    values = [np.zeros(num_elements), torch.zeros(num_elements)]
    before = _fingerprint(values)
    for value in values:
        value[-1] = 1
        after = _fingerprint(values)
        assert after != before
        before = after


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a", None], object),
        np.array(["2024-01-01"], "M8[D]"),
        np.zeros(0),
        np.zeros((), [("x", "i4")]),
        torch.zeros(0),
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.complex64).conj(),
    ],
    ids=str,
)
def test_data_of_every_kind_has_a_fingerprint(value: Any) -> None:
    assert _fingerprint([value]) == _fingerprint([value])
