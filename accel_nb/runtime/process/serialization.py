"""Serialization of Python values without pickle: a JSON tree, then the bytes of arrays and tensors.

Layout: eight bytes with the length of the tree, the tree, then the buffers in the order of their positions in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from accel_nb.errors import MisuseError

_PREFIX = 8
_MAX_DEPTH = 200
_PLAIN = (type(None), bool, int, str)
_ARRAY_KINDS = "biufcSUMm"
_ADVICE = (
    "Ranks exchange None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, tensors and NumPy "
    "arrays and scalars, never pickles: turn it into these first, with dict(...), tuple(...), dataclasses.asdict(...) "
    "or str(...)"
)


def encode(value: Any) -> bytes:
    """Return ``value`` as a message; raise `MisuseError` with type and position if a part of it cannot be sent.

    Tensors may be on any device and are sent without their gradients.
    """
    buffers: list[bytes] = []
    tree = json.dumps(_tree(value, buffers, ()), separators=(",", ":")).encode()
    return b"".join([len(tree).to_bytes(_PREFIX, "big"), tree, *buffers])


def decode(message: bytes) -> Any:
    """Return the value of a message; tensors are on the CPU.

    Raises ``ValueError`` for a message that `encode` did not write: invalid JSON, an unknown kind, a wrong type or a
    wrong length.
    """
    end = _PREFIX + int.from_bytes(message[:_PREFIX], "big")
    if len(message) < _PREFIX or end > len(message):
        raise ValueError(f"a message of {len(message)} bytes is cut off")
    reader = _Reader(memoryview(message)[end:])
    try:
        value = reader.value(json.loads(message[_PREFIX:end]))
    except (TypeError, KeyError, IndexError, OverflowError, RecursionError, RuntimeError) as error:
        raise ValueError(f"a message was not written by accel_nb: {error}") from None
    reader.check_end()
    return value


def _tree(value: Any, buffers: list[bytes], path: tuple[Any, ...]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if len(path) > _MAX_DEPTH:
        raise MisuseError(
            f"a value nested more than {_MAX_DEPTH} deep cannot be sent between ranks; does it contain itself?"
        )
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is list:
        return [_tree(item, buffers, (*path, index)) for index, item in enumerate(value)]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [_tree(item, buffers, (*path, index)) for index, item in enumerate(value)]}
    if kind is dict:
        pairs = [
            [_tree(key, buffers, (*path, "key")), _tree(item, buffers, (*path, key))] for key, item in value.items()
        ]
        return {"dict": pairs}
    if kind is complex:
        return {"complex": [_tree(value.real, buffers, path), _tree(value.imag, buffers, path)]}
    if kind is bytes:
        buffers.append(value)
        return {"bytes": len(value)}
    if isinstance(value, Tensor):
        return _tensor_tree(value, buffers, path)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _array_tree(value, buffers, path)
    raise _unsupported(value, path)


def _tensor_tree(value: Tensor, buffers: list[bytes], path: tuple[Any, ...]) -> Any:
    if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
        raise _unsupported(value, path, f"a tensor of layout {kind} on {value.device}")
    flat = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    buffers.append(content)
    return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), len(content)]}


def _array_tree(value: Any, buffers: list[bytes], path: tuple[Any, ...]) -> Any:
    array = np.asarray(value)
    if array.dtype.kind not in _ARRAY_KINDS:
        raise _unsupported(value, path, f"a NumPy value of dtype {array.dtype}")
    content = array.tobytes()
    buffers.append(content)
    return {"array" if type(value) is np.ndarray else "scalar": [array.dtype.str, list(array.shape), len(content)]}


def _unsupported(value: Any, path: tuple[Any, ...], what: str | None = None) -> MisuseError:
    where = "".join(f"[{key!r}]" for key in path)
    kind = what or f"a {type(value).__module__}.{type(value).__qualname__}"
    return MisuseError(f"{kind}{f' at {where}' if where else ''} cannot be sent between ranks. {_ADVICE}")


class _Reader:
    """Rebuilds values from a tree; reads the buffers in order."""

    def __init__(self, buffers: memoryview) -> None:
        self._buffers = buffers
        self._position = 0
        self._kinds: dict[str, Callable[[Any], Any]] = {
            "tuple": lambda items: tuple(self.value(item) for item in items),
            "set": lambda items: {self.value(item) for item in items},
            "frozenset": lambda items: frozenset(self.value(item) for item in items),
            "dict": lambda pairs: {self.value(key): self.value(item) for key, item in pairs},
            "float": float,
            "complex": lambda parts: complex(self.value(parts[0]), self.value(parts[1])),
            "bytes": self._read_bytes,
            "tensor": self._tensor,
            "array": self._array,
            "scalar": lambda header: self._array(header)[()],
        }

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(item) for item in cast("list[Any]", tree)]
        if not isinstance(tree, dict):
            return tree
        [(kind, content)] = cast("dict[str, Any]", tree).items()
        if kind not in self._kinds:
            raise ValueError(f"a message contains a value of unknown kind {kind!r}")
        return self._kinds[kind](content)

    def check_end(self) -> None:
        if self._position != len(self._buffers):
            raise ValueError(f"a message has {len(self._buffers) - self._position} bytes that belong to no value")

    def _read_bytes(self, length: int) -> bytes:
        if not 0 <= length <= len(self._buffers) - self._position:
            raise ValueError("a message is shorter than its values")
        content = bytes(self._buffers[self._position : self._position + length])
        self._position += length
        return content

    def _tensor(self, header: list[Any]) -> Tensor:
        name, shape, length = header
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or length != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"a message contains a tensor {name}{shape} of {length} bytes")
        content = self._read_bytes(length)
        if not content:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)

    def _array(self, header: list[Any]) -> Any:
        name, shape, length = header
        dtype = np.dtype(name)
        if dtype.kind not in _ARRAY_KINDS or length != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"a message contains an array {name}{shape} of {length} bytes")
        return np.frombuffer(self._read_bytes(length), dtype=dtype).reshape(shape).copy()
