"""Construction of dataclasses from plain values of another process, with checks of fields and types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def build(record: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass of these values, lists as tuples where it has tuples; raises ValueError with the wrong field.

    Mappings become records where a field, an item of a tuple or a value of a dict is a dataclass. Of other lists and
    dicts only the outermost level is checked. An int counts as a float. The message contains no values.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{record.__name__} is not a mapping, but of type {type(values).__name__}")
    hints = hints_of(record)
    if values.keys() != hints.keys():
        wrong = ", ".join(sorted(str(name)[:40] for name in values.keys() ^ hints.keys()))
        raise ValueError(f"{record.__name__} lacks, or has no such fields: {wrong}")
    made = {name: _read(value, hints[name]) for name, value in values.items()}
    for name, value in made.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{name} of {record.__name__} is no {hints[name]}, but of type {type(value).__name__}")
    return record(**made)


@cache
def hints_of(record: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    hints = get_type_hints(record)
    return {item.name: hints[item.name] for item in fields(record)}


def _is_record(hint: Any) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and is_dataclass(hint)


def _read(value: Any, hint: Any) -> Any:
    """Return a value with tuples for lists and records for mappings, where its type has these."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is tuple and type(value) in (list, tuple):
        if len(parts) == 2 and _is_record(parts[0]):
            return tuple(build(parts[0], item) for item in value)
        return tuple(value)
    if kind is dict and type(value) is dict and _is_record(parts[1]):
        return {name: build(parts[1], item) for name, item in value.items()}
    return build(hint, value) if _is_record(hint) and not isinstance(value, hint) else value


def _fits(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
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
