"""The compiler flags of imports from ``__future__``."""

from __future__ import annotations
import __future__

import ast
import functools
import operator
from collections.abc import Iterator

FUTURE_FLAGS = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
"""The compiler flags of all imports from ``__future__``."""


def find_future_imports(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    """Yield the imports from ``__future__`` of a source."""
    return (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__")


def future_flags(tree: ast.Module) -> int:
    """Return the compiler flags of the imports from ``__future__`` of a source."""
    names = {alias.name for node in find_future_imports(tree) for alias in node.names}
    return sum(getattr(__future__, name).compiler_flag for name in names.intersection(__future__.all_feature_names))
