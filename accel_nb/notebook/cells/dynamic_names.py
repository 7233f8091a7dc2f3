"""Code that looks up names which are not in its text, as ``globals()[name]`` does: it may use any name."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Sequence

_SCOPES = frozenset({"globals", "locals", "vars"})
_EVALUATE = frozenset({"eval", "exec"})
_CALLS = frozenset({"CACHE", "PRECALL", "CALL", "CALL_FUNCTION", "PUSH_NULL", "NOP"})


def looks_up_names(tree: ast.AST) -> bool:
    """Return whether code takes a name to look up from a value, or evaluates a text that is not a constant."""
    constant = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript) and _is_text(node.slice)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and _is_text(node.left):
            constant |= set(map(id, node.comparators))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and any(map(_is_text, node.args[:1])):
            constant.add(id(node.func.value))
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (
            (node.func.id in _SCOPES and not node.args and id(node) not in constant)
            or (node.func.id in _EVALUATE and bool(node.args) and not _is_text(node.args[0]))
        )
        for node in ast.walk(tree)
    ) or any(_is_main_module(node) for node in ast.walk(tree))


def code_looks_up_names(code: types.CodeType) -> bool:
    """Return whether a function's own code looks up names as `looks_up_names` does."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _CALLS]
    for index, step in enumerate(steps):
        if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        if step.argval == "globals" and not _is_constant(steps, index):
            return True
        if step.argval in _EVALUATE and not _loads_text(steps[index + 1]):
            return True
    return "__name__" in code.co_names and "modules" in code.co_names


def _is_constant(steps: Sequence[dis.Instruction], index: int) -> bool:
    """Return whether a call of ``globals`` is between a text and ``in``, or is followed by a subscript with a text."""
    after = steps[index + 1 : index + 3]
    if after[0].opname == "CONTAINS_OP":
        return index > 0 and _loads_text(steps[index - 1])
    return len(after) == 2 and _loads_text(after[0]) and after[1].opname in ("BINARY_SUBSCR", "BINARY_OP")


def _loads_text(step: dis.Instruction) -> bool:
    return step.opname.startswith("LOAD_CONST") and isinstance(step.argval, str)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_main_module(node: ast.AST) -> bool:
    """Return whether an expression is ``sys.modules[__name__]`` or ``get_ipython().user_ns``."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "modules":
        return isinstance(node.slice, ast.Name) and node.slice.id == "__name__"
    return isinstance(node, ast.Attribute) and node.attr == "user_ns"
