"""The sources of the package as tests of them read them: each file is parsed once in a process."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "accel_nb"
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return the nodes of a file."""
    is_collecting = gc.isenabled()
    gc.disable()  # a tree has hundreds of thousands of nodes, which each collection would look at again
    try:
        return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    finally:
        gc.freeze()
        if is_collecting:
            gc.enable()


def dotted(node: ast.AST) -> str:
    """Return what is named as it is written, as far as it is names and dots."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
