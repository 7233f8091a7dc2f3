"""Dataclasses built from plain values that another process has sent, with checks of all fields and their types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def build_record(record: type[T], values: Mapping[str, Any]) -> T:
    """Return a record with these values; raise ValueError that names a wrong field, but not its value.

    Lists become tuples where the record has tuples. Mappings become records where a field, an item of a tuple or a
    value of a dict is a dataclass; fields may be optional. The items of other lists and dicts are not checked. An
    integer is valid for a float.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{record.__name__} is not a mapping, but of type {type(values).__name__}")
    types = field_types(record)
    if values.keys() != types.keys():
        wrong = ", ".join(sorted(str(name)[:40] for name in values.keys() ^ types.keys()))
        raise ValueError(f"{record.__name__} lacks, or has no such fields: {wrong}")
    converted: dict[str, Any] = {}
    for name, value in values.items():
        wanted = types[name]
        if not wanted.parts and wanted.record is None and type(value) is wanted.kind:
            converted[name] = value
            continue
        converted[name] = value = _convert(value, wanted)
        if not _fits(value, wanted):
            raise ValueError(f"{name} of {record.__name__} is no {wanted.hint}, but of type {type(value).__name__}")
    return record(**converted)


@dataclass(frozen=True, slots=True, eq=False)
class FieldType:
    """The type of a field or of an item, resolved once: comparing and hashing hints is slow."""

    hint: Any
    kind: Any
    """The class of the type, without its arguments."""
    parts: tuple[Any, ...]
    """The types of the arguments; of a Literal, its values."""
    record: Any
    """The dataclass that the type is or contains; None without one."""


@cache
def field_types(record: type) -> dict[str, FieldType]:
    """Return the types of a dataclass's fields, by name."""
    hints = get_type_hints(record)
    return {item.name: _resolve(hints[item.name]) for item in fields(record)}


def _resolve(hint: Any) -> FieldType:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    item = parts[0] if kind is tuple and parts[1:] == (...,) else parts[1] if kind is dict and parts else hint
    record = item if isinstance(item, type) and is_dataclass(item) else None
    return FieldType(hint, kind, parts if kind is Literal else tuple(map(_resolve, parts)), record)


def _convert(value: Any, wanted: FieldType) -> Any:
    """Return a value with lists converted to tuples and mappings to records, as its type requires."""
    kind, record = wanted.kind, wanted.record
    if kind in (Union, UnionType):
        others = [part for part in wanted.parts if part.kind is not type(None)]
        return _convert(value, others[0]) if value is not None and len(others) == 1 else value
    if kind is tuple and type(value) in (list, tuple):
        return tuple(value) if record is None else tuple(build_record(record, item) for item in value)
    if record is None:
        return value
    if kind is dict and type(value) is dict:
        return {name: build_record(record, item) for name, item in value.items()}
    return build_record(record, value) if kind is record and not isinstance(value, record) else value


def _fits(value: Any, wanted: FieldType) -> bool:
    kind, parts = wanted.kind, wanted.parts
    if type(value) is kind and not parts:
        return True
    if kind is Any:
        return True
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is tuple and len(parts) == 2 and parts[1].kind is ...:
        return type(value) is tuple and all(_fits(item, parts[0]) for item in value)
    if kind is float:
        return type(value) in (float, int)
    return value is None if kind is type(None) else type(value) is kind
