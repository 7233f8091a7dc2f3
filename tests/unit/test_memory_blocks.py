"""Tensors and arrays that share memory share it after they were sent, and what does not stays apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from accel_nb.pool.sync.stream.pickling import dump, load


def sent(*values: Any) -> list[Any]:
    stream, buffers = dump(list(values), namespace={}, shared={})
    return load(stream, [memoryview(bytearray(buffer)) for buffer in buffers], namespace={})


VIEWS = {
    "rows": lambda array: array[1:3],
    "reversed": lambda array: array[::-1],
    "column": lambda array: array[:, 1],
    "transposed": lambda array: array.T,
    "tensor": torch.from_numpy,
    "tensor of rows": lambda array: torch.from_numpy(array[2:]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_array_shares_its_memory(name: str) -> None:
    array, view = np.arange(12.0).reshape(4, 3), VIEWS[name]
    copied, other = sent(array, view(array))
    copied *= 10
    np.testing.assert_array_equal(np.asarray(other), np.asarray(view(array * 10)))


@pytest.mark.parametrize("name", ["rows", "reversed", "column", "transposed", "tensor"])
def test_the_view_may_come_first(name: str) -> None:
    array, view = np.arange(12.0).reshape(4, 3), VIEWS[name]
    other, copied = sent(view(array), array)
    copied *= 10
    np.testing.assert_array_equal(np.asarray(other), np.asarray(view(array * 10)))


def test_a_small_view_of_a_tensor_shares_its_memory() -> None:
    table = torch.zeros(10, 2)
    row, copied = sent(table[3], table)
    copied.fill_(1)
    assert row.tolist() == [1, 1]


def test_of_a_large_block_a_small_view_alone_is_sent() -> None:
    large = np.zeros(2**20)
    for view in (large[:10], torch.from_numpy(large)[:10]):
        _, buffers = dump(view, namespace={}, shared={})
        assert sum(buffer.nbytes for buffer in buffers) == 80


ARRAYS = [
    np.asfortranarray(np.arange(12.0).reshape(3, 4)), np.array(3.0), np.array([], float), np.array(["a", "bc"]),
    np.array([1], "M8[s]"), np.broadcast_to(np.arange(3.0), (4, 3)), np.frombuffer(b"12345678"), np.zeros((0, 3)),
    np.array([(1, 2.0)], dtype="i4,f8"), np.arange(3, dtype=">i4"), np.array([None, 1]),
    np.lib.stride_tricks.sliding_window_view(np.arange(5.0), 2),
]  # fmt: skip


@pytest.mark.parametrize("array", ARRAYS, ids=range(len(ARRAYS)))
def test_an_array_of_any_layout_is_sent(array: np.ndarray) -> None:
    (found,) = sent(array)
    np.testing.assert_array_equal(found, array)
    assert (found.dtype, found.flags.writeable) == (array.dtype, array.flags.writeable)


def test_a_small_tensor_can_be_resized() -> None:
    (copied,) = sent(torch.zeros(()))
    assert copied.resize_(3).fill_(1).tolist() == [1, 1, 1]


def test_conjugates_and_their_imaginary_parts_have_their_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    copied, conjugate, imaginary, leaf = sent(
        value, value.conj(), value.conj().imag, value.conj().clone().conj().requires_grad_()
    )
    assert conjugate.tolist() == [1 - 2j, 3 + 4j]
    assert imaginary.tolist() == [-2, 4]
    assert leaf.tolist() == [1 + 2j, 3 - 4j]
    assert leaf.is_leaf
    assert leaf.requires_grad
    copied.fill_(1j)
    assert conjugate.tolist() == [-1j, -1j]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_leaf_gets_a_gradient(layout: torch.layout) -> None:
    leaf = torch.eye(2).to_sparse(layout=layout).requires_grad_()
    leaf.tag = "edges"  # type: ignore[attr-defined]
    (copied,) = sent(leaf)
    torch.sparse.mm(copied, torch.ones(2, 1)).sum().backward()
    assert copied.tag == "edges"
    assert copied.grad.to_dense().tolist() == [[1, 0], [0, 1]]
