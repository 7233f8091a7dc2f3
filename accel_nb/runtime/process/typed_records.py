"""Dataclasses built from plain values that another process has sent, with checks of all fields and their types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
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
    hints = field_types(record)
    if values.keys() != hints.keys():
        wrong = ", ".join(sorted(str(name)[:40] for name in values.keys() ^ hints.keys()))
        raise ValueError(f"{record.__name__} lacks, or has no such fields: {wrong}")
    converted = {name: _convert(value, hints[name]) for name, value in values.items()}
    for name, value in converted.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{name} of {record.__name__} is no {hints[name]}, but of type {type(value).__name__}")
    return record(**converted)


@cache
def field_types(record: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    hints = get_type_hints(record)
    return {item.name: hints[item.name] for item in fields(record)}


def _convert(value: Any, hint: Any) -> Any:
    """Return a value with lists converted to tuples and mappings to records, as its type requires."""
    kind, parts, item_record = _kind_of(hint)
    if kind in (Union, UnionType):
        others = [part for part in parts if part is not type(None)]
        return _convert(value, others[0]) if value is not None and len(others) == 1 else value
    if kind is tuple and type(value) in (list, tuple):
        return tuple(value) if item_record is None else tuple(build_record(item_record, item) for item in value)
    if item_record is None:
        return value
    if kind is dict and type(value) is dict:
        return {name: build_record(item_record, item) for name, item in value.items()}
    return build_record(item_record, value) if kind is item_record and not isinstance(value, item_record) else value


@cache
def _kind_of(hint: Any) -> tuple[Any, tuple[Any, ...], type | None]:
    """Return the class of a type, its arguments, and the dataclass that it is or contains; None without one."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    item = parts[0] if kind is tuple and parts[1:] == (...,) else parts[1] if kind is dict and parts else hint
    return kind, parts, item if isinstance(item, type) and is_dataclass(item) else None


def _fits(value: Any, hint: Any) -> bool:
    kind, parts, _ = _kind_of(hint)
    if type(value) is kind and not parts:
        return True
    if kind is Any:
        return True
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is tuple and parts[1:] == (...,):
        return type(value) is tuple and all(_fits(item, parts[0]) for item in value)
    if kind is float:
        return type(value) in (float, int)
    return value is None if kind is type(None) else type(value) is kind
