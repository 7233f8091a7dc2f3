"""Cells that call ``hash``: the hash of a string differs between processes."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable

from accel_nb.notebook.cells.cell_analysis import global_names
from accel_nb.runtime.code_objects import nested_codes

_LINE = (
    "this cell calls hash(...): of text it is another number on the workers than in the notebook, as in each process "
    "of Python. Use one that is the same everywhere, such as zlib.crc32(text.encode()), in every cell"
)


def describe_hashes(tree: ast.AST, codes: Iterable[types.CodeType]) -> list[str]:
    """Return a line if the code of a cell, or the notebook's code that it may run, calls Python's ``hash``.

    Methods ``__hash__`` are left out: the hashes of objects are compared within one process.
    """
    return [_LINE] if _names_hash(tree) or any(map(_calls_hash, codes)) else []


def _calls_hash(code: types.CodeType) -> bool:
    is_named = code.co_name != "__hash__" and any("hash" in part.co_names for part in nested_codes(code))
    return is_named and "hash" in global_names(code)


def _names_hash(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef) and node.name == "__hash__":
        return False
    if isinstance(node, ast.Name) and node.id == "hash":
        return True
    return any(map(_names_hash, ast.iter_child_nodes(node)))
