"""Code objects of Python functions."""

from __future__ import annotations

import types
from collections.abc import Iterator


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and the code objects of functions, classes and comprehensions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)
