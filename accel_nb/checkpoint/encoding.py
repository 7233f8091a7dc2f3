"""Encoding of state trees as strict JSON and back: exact types by tags, tensors by reference.

A *state tree* consists of dicts, lists, tuples, numbers, text and tensors. Types that JSON lacks are objects with one
key that begins with ``$``. `decode` builds plain values only: it never looks up types or functions by a name from
the file. `encode` raises an error, with the path, for other values.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from accel_nb.checkpoint.layout import Region, full_region, parse_json
from accel_nb.errors import CheckpointError, CorruptCheckpoint
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.safetensors_header import DTYPES

MAX_DEPTH = 100

DTYPE_NAMES: Mapping[torch.dtype, str] = {getattr(torch, theirs): name for name, (theirs, _) in DTYPES.items()}

_TORCH_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPE_NAMES, torch.complex128)}
_NUMPY_SCALARS = {
    name: getattr(np, name)
    for name in (
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    )
}


@dataclass(frozen=True, slots=True)
class Slice:
    """This rank's shard of a global tensor; all shards together tile ``shape``; several ranks may hold the same one."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FromRankZero:
    """A tensor that every rank has and that may differ between ranks: rank 0's is saved."""

    tensor: Tensor


StateLeaf: TypeAlias = "Tensor | Slice | FromRankZero"


@dataclass
class EncodedState:
    """An encoded tree: its JSON, and its tensors by path; the same tensor in several places has one path."""

    document: Any = None
    leaves: dict[str, StateLeaf] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the JSON text."""
        return json.dumps(self.document, allow_nan=False, separators=(",", ":")).encode()


def leaf_tensor(leaf: StateLeaf) -> Tensor:
    """Return this rank's tensor of a leaf."""
    return leaf if isinstance(leaf, Tensor) else leaf.tensor


def lacks_memory(tensor: Tensor) -> bool:
    """Return whether a tensor with elements has no storage: its values are in inner tensors, or it is on meta."""
    return tensor.numel() > 0 and (tensor.is_meta or not tensor.data_ptr())


def leaf_region(leaf: StateLeaf) -> tuple[Region, tuple[int, ...]]:
    """Return the region of the global tensor that the leaf holds, and the global shape."""
    if isinstance(leaf, Slice):
        return Region(tuple(leaf.offsets), tuple(leaf.tensor.shape)), tuple(leaf.shape)
    shape = tuple(leaf_tensor(leaf).shape)
    return full_region(shape), shape


def encode(tree: Any) -> EncodedState:
    """Encode a tree; raises `CheckpointError` with the path of a value that cannot be stored."""
    encoder = _Encoder()
    encoder.result.document = encoder.encode(tree, (), 0)
    return encoder.result


class _Encoder:
    def __init__(self) -> None:
        self.result = EncodedState()
        self._known: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _refusal(path, f"it is nested deeper than {MAX_DEPTH} levels, or contains itself")
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return self._encode_int(value, path)
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, (*path, _segment(key)), depth + 1) for key, item in value.items()}
        if kind in _MAPPINGS:
            return {_MAPPINGS[kind]: self._pairs(value, path, depth)}
        if kind is list:
            return self._items(value, path, depth)
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._items(value, path, depth)}
        if kind in (set, frozenset):
            return {"$set" if kind is set else "$frozenset": self._items(sorted(value, key=repr), path, depth)}
        if isinstance(value, Tensor | Slice | FromRankZero):
            return {"$tensor": self._tensor(value, path)}
        return self._encode_other(value, path)

    def _encode_other(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is complex:
            return {"$complex": [self.encode(value.real, path, 0), self.encode(value.imag, path, 0)]}
        if kind is torch.dtype and value in _TORCH_DTYPES.values():
            return {"$dtype": str(value).removeprefix("torch.")}
        if kind is np.bool_:
            return {"$numpy": ["bool", bool(value)]}
        if isinstance(value, np.number) and kind.__name__ in _NUMPY_SCALARS:
            return {"$numpy": [kind.__name__, self.encode(value.item(), path, 0)]}
        if kind is np.ndarray:
            try:
                tensor = torch.from_numpy(np.array(value))  # a copy: it may be read-only, or strided backwards
            except (TypeError, ValueError):  # ValueError for another byte order
                raise _refusal(path, f"it is an array of {value.dtype}, which torch does not support") from None
            return {"$array": self._tensor(tensor, path)}
        raise _refusal(
            path,
            f"it is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, arrays, numbers, text, None, "
            "dicts, lists, tuples and sets. Give it state_dict and load_state_dict that return and take such values",
        )

    def _tensor(self, leaf: StateLeaf, path: tuple[str, ...]) -> str:
        name, tensor = "/".join(path) or "tensor", leaf_tensor(leaf)
        while name in self.result.leaves:  # of another key with the same text, such as None and "None"
            name += "'"
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in DTYPE_NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
            raise _refusal(
                path, f"it is a tensor of {tensor.dtype}, {tensor.layout}; a checkpoint holds dense ones of {known}"
            )
        region, shape = leaf_region(leaf)
        if not region.is_inside(shape):
            raise _refusal(path, f"its shard {region} is outside of the global shape {list(shape)}")
        identity = _identity(leaf, tensor)
        known = self._known.get(identity) if identity else None
        if known is not None:
            return known
        if identity:
            self._known[identity] = name
        self.result.leaves[name] = leaf
        return name

    def _items(self, values: Any, path: tuple[str, ...], depth: int) -> list[Any]:
        return [self.encode(item, (*path, str(index)), depth + 1) for index, item in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], path: tuple[str, ...], depth: int) -> list[Any]:
        return [
            [self._key(key, path), self.encode(item, (*path, _segment(key)), depth + 1)] for key, item in values.items()
        ]

    def _key(self, key: Any, path: tuple[str, ...]) -> Any:
        encoded = self.encode(key, path, MAX_DEPTH - 4)
        if isinstance(key, Tensor | Slice | FromRankZero | np.ndarray):
            raise _refusal(path, "one of its keys is a tensor")
        return encoded

    def _encode_int(self, value: int, path: tuple[str, ...]) -> int:
        if value.bit_length() > 1 << 12:
            raise _refusal(path, "it is a whole number of more than 4096 bits")
        return value


_MAPPINGS = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_SEQUENCES = {tuple: "$tuple", torch.Size: "$size"}


def _segment(key: Any) -> str:
    """Return one component of a path; text that looks like a number is quoted, so that 3 and "3" differ."""
    if type(key) is not str:
        return str(key)
    text = key.replace("~", "~0").replace("/", "~1")
    return f'"{text}"' if text.lstrip("-").isdigit() or text.startswith('"') else text


def _identity(leaf: StateLeaf, tensor: Tensor) -> tuple[Any, ...] | None:
    if tensor.numel() == 0 or not device_type(tensor.device).has_addresses or lacks_memory(tensor):
        return None
    place = tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    return (*place, tensor.is_conj(), tensor.is_neg(), type(leaf), *leaf_region(leaf))


def _refusal(path: tuple[str, ...], why: str) -> CheckpointError:
    return CheckpointError(f"{'/'.join(path) or 'the state'} cannot be stored: {why}")


def decode(text: bytes, tensor: Callable[[str], Any], where: str) -> Any:
    """Return the tree of `EncodedState.to_bytes`; ``tensor(path)`` returns the placeholder of a tensor.

    Raises `CorruptCheckpoint` for anything that `encode` does not write.
    """
    return _Decoder(tensor, where).decode(parse_json(text, where), 0)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The placeholder of a NumPy array in the result of `decode`; its tensor is not read yet."""

    tensor: Any


class _Decoder:
    def __init__(self, tensor: Callable[[str], Any], where: str) -> None:
        self._tensor = tensor
        self._where = where

    def decode(self, value: Any, depth: int) -> Any:
        if depth > 2 * MAX_DEPTH:
            raise self._error("it is nested too deeply")
        if isinstance(value, list):
            return [self.decode(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if len(value) != 1 or not tag.startswith("$"):
            if any(key.startswith("$") for key in value):
                raise self._error("an object with a tag has other keys too")
            return {key: self.decode(item, depth + 1) for key, item in value.items()}
        make = _TAGS.get(tag)
        if make is None:
            raise self._error(f"the tag {tag[:40]!a} is unknown")
        try:
            return make(self, value[tag], depth + 1)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise self._error(f"the content of {tag} is invalid ({str(error)[:100]})") from None

    def pairs(self, value: Any, depth: int) -> list[tuple[Any, Any]]:
        return [(self.decode(key, depth), self.decode(item, depth)) for key, item in value]

    def items(self, value: Any, depth: int) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError("not a list")
        return [self.decode(item, depth) for item in value]

    def tensor(self, path: Any) -> Any:
        if not isinstance(path, str):
            raise TypeError("not a path")
        return self._tensor(path)

    def number(self, value: Any) -> float:
        number = self.decode(value, 0)
        if type(number) not in (int, float):
            raise TypeError("not a number")
        return number

    def _error(self, why: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self._where}: {why}")


def _float(value: Any) -> float:
    if value not in ("inf", "-inf", "nan"):
        raise ValueError("not a special number")
    return float(value)


def _numpy(decoder: _Decoder, value: Any) -> Any:
    name, content = value
    if name == "bool":
        if type(content) is not bool:
            raise TypeError("not a boolean")
        return np.bool_(content)
    number = decoder.number(content)
    found = _NUMPY_SCALARS[name](number)
    if found != number and number == number:  # NumPy 1 wraps integers, and NaN differs from itself
        raise ValueError(f"{number} is not of NumPy's type {name}")
    return found


def _dtype(name: Any) -> torch.dtype:
    return _TORCH_DTYPES[name]


_TAGS: Mapping[str, Callable[[_Decoder, Any, int], Any]] = {
    "$float": lambda decoder, value, depth: _float(value),
    "$dict": lambda decoder, value, depth: dict(decoder.pairs(value, depth)),
    "$ordered": lambda decoder, value, depth: OrderedDict(decoder.pairs(value, depth)),
    "$counter": lambda decoder, value, depth: Counter(dict(decoder.pairs(value, depth))),
    "$tuple": lambda decoder, value, depth: tuple(decoder.items(value, depth)),
    "$size": lambda decoder, value, depth: torch.Size(decoder.items(value, depth)),
    "$set": lambda decoder, value, depth: set(decoder.items(value, depth)),
    "$frozenset": lambda decoder, value, depth: frozenset(decoder.items(value, depth)),
    "$bytes": lambda decoder, value, depth: base64.b64decode(value, validate=True),
    "$complex": lambda decoder, value, depth: complex(*(decoder.number(part) for part in value)),
    "$dtype": lambda decoder, value, depth: _dtype(value),
    "$numpy": lambda decoder, value, depth: _numpy(decoder, value),
    "$tensor": lambda decoder, value, depth: decoder.tensor(value),
    "$array": lambda decoder, value, depth: StoredArray(decoder.tensor(value)),
}
