from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_nb.errors import MisuseError
from accel_nb.runtime.process import serialization

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value):
    found = serialization.decode(serialization.encode(value))

    assert found == value
    assert type(found) is type(value)


def test_numbers_that_json_lacks_come_back():
    infinite, missing = serialization.decode(serialization.encode([float("-inf"), float("nan")]))

    assert infinite == float("-inf")
    assert missing != missing


@pytest.mark.parametrize("value", [{1, 2, "x"}, frozenset([(1, 2)]), {(1, "a"): {2: None}}, b"", (), [], {}])
def test_sets_and_keys_that_json_lacks_come_back(value):
    found = serialization.decode(serialization.encode(value))

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_tensors_come_back_with_dtype_and_shape(dtype, shape):
    tensor = (torch.rand(shape) * 10).to(dtype)

    found, other = serialization.decode(serialization.encode((tensor, tensor.t() if tensor.dim() == 2 else tensor)))

    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    conjugated = serialization.decode(serialization.encode(tensor.conj()))
    assert torch.equal(conjugated, tensor.conj())
    assert other.shape == (tensor.t() if tensor.dim() == 2 else tensor).shape
    assert not found.requires_grad


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5),
        np.int8(-3),
        np.bool_(True),
        np.array(2.0),
        np.arange(6).reshape(2, 3)[:, ::-1],
        np.array(["ab", "c"]),
    ],
)
def test_numpy_values_come_back(value):
    found = serialization.decode(serialization.encode({"v": value}))["v"]

    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert np.array_equal(found, value)
    if isinstance(found, np.ndarray):
        found[...] = found  # writable


class Own:
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Own(), "Own"),
        ([1, {"a": lambda: 1}], r"function at \[1\]\['a'\]"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        (namedtuple("Point", "x")(1), "Point"),
        (np.array([Own()], dtype=object), "dtype object"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(1, device="meta"), "meta"),
    ],
)
def test_other_types_are_refused_by_name_with_the_way_out(value, named):
    with pytest.raises(MisuseError, match=named) as raised:
        serialization.encode(value)
    assert "never pickles" in str(raised.value)


def test_a_value_that_holds_itself_is_refused():
    loop: list = []
    loop.append(loop)

    with pytest.raises(MisuseError, match="does it contain itself"):
        serialization.encode(loop)


def _message(tree: bytes, rest: bytes = b"") -> bytes:
    return len(tree).to_bytes(8, "big") + tree + rest


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00" * 7,
        _message(b"[1]")[:-1],
        _message(b"[1"),
        _message(b"1", b"x"),
        _message(b'{"pickle":1}'),
        _message(b'{"bytes":5}', b"ab"),
        _message(b'{"bytes":-1}', b"ab"),
        _message(b'{"tensor":["float32",[2],7]}', b"1234567"),
        _message(b'{"tensor":["load",[1],4]}', b"1234"),
        _message(b'{"array":["|O",[1],8]}', b"12345678"),
        _message(b'{"array":["<f4",[-1],4]}', b"1234"),
        _message(b'{"a":1,"b":2}'),
    ],
)
def test_what_was_not_encoded_here_is_refused(message):
    with pytest.raises(ValueError):  # noqa: PT011  (of many kinds)
        serialization.decode(message)
