"""Values that may differ among ranks after a cell, such as names of temporary folders, as digests to compare.

Only plain values are compared, alone and in containers and objects: numbers, strings, paths, times and identifiers.
A process makes them from its own clock, its process id and the operating system's random numbers.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import itertools
import numbers
import types
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import PurePath
from typing import Any

_MAX_ITEMS = 1000
"""A value of more items is not compared."""
_TEXTS = (str, bytes, PurePath, uuid.UUID, datetime.date, datetime.time, datetime.timedelta)
_NUMBERS = (numbers.Number, decimal.Decimal, fractions.Fraction)
_OBJECTS = (types.SimpleNamespace, argparse.Namespace)


def digest_values(namespace: Mapping[str, Any], names: Iterable[str], *, with_numbers: bool) -> dict[str, int]:
    """Return by name digests of the plain parts of values; without ``with_numbers`` numbers are left out."""
    found: dict[str, int] = {}
    for name in names:
        with suppress(Exception):  # the user's code may raise anything, and another thread may change the value
            parts = _plain_parts(namespace[name], set(), with_numbers)
            texts = list(itertools.islice(parts, _MAX_ITEMS + 1))
            if 0 < len(texts) <= _MAX_ITEMS:
                found[name] = zlib.crc32("\n".join(texts).encode(errors="surrogatepass"))
    return found


def _plain_parts(value: Any, seen: set[int], with_numbers: bool) -> Iterator[str]:
    if isinstance(value, _TEXTS) or (with_numbers and isinstance(value, _NUMBERS)):
        yield repr(value)
        return
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple):
        items = value
    elif isinstance(value, Set):
        yield from sorted(text for item in value for text in _plain_parts(item, seen, with_numbers))
    elif isinstance(value, _OBJECTS) or (type(value).__module__ == "__main__" and not isinstance(value, type)):
        items = getattr(value, "__dict__", {}).values()
    if items and id(value) not in seen:
        seen.add(id(value))
        for item in items:
            yield from _plain_parts(item, seen, with_numbers)
