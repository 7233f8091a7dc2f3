"""Strict JSON: no duplicate keys, no NaN, no infinities."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_strict_json(text: bytes | bytearray) -> Any:
    """Return the value of UTF-8 JSON; raises `ValueError` for duplicate keys, NaN, infinities and too deep nesting."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_check_unique, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def name_non_finite(value: Any) -> Any:
    """Return a tree of dicts and lists in which numbers that JSON cannot represent are "nan", "inf" or "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, dict):
        return {str(key): name_non_finite(item) for key, item in value.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [name_non_finite(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a duplicate key")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
