"""Static analysis of how often a cell's outermost loop runs: ``for epoch in range(10)``."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from accel_nb.ui.progress import LoopPlan

_MAX_TOTAL = 10**12
_WRAPPERS = frozenset({"tqdm", "trange", "track", "enumerate"})
_NESTED_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def find_loop_plan(tree: ast.Module, namespace: Mapping[str, Any]) -> LoopPlan | None:
    """Return how many epochs or steps the cell's only outermost range loop has; None for no or several such loops.

    The range's bounds must be numbers in the code, or names of numbers in the notebook or the cell.
    """
    scope = {**_integers(dict(namespace).items()), **_assigned_integers(tree)}
    found = [(loop, total) for loop in _outer_loops(tree) if (total := _range_length(loop.iter, scope))]
    if len(found) != 1:
        return None
    loop, total = found[0]
    nodes = [node for part in loop.body for node in ast.walk(part)]
    has_inner_loop = any(isinstance(node, ast.For | ast.While) for node in nodes)
    steps = any(isinstance(node, ast.Attribute) and node.attr in ("backward", "step") for node in nodes)
    return LoopPlan("steps" if steps and not has_inner_loop else "epochs", total)


def _outer_loops(node: ast.AST) -> Iterator[ast.For]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.For):
            yield child
        elif not isinstance(child, _NESTED_SCOPES):
            yield from _outer_loops(child)


def _range_length(iterable: ast.expr, scope: Mapping[str, int]) -> int | None:
    """Return the length of ``range(...)``, alone or in ``tqdm``; None for anything else."""
    if not isinstance(iterable, ast.Call):
        return None
    name = iterable.func.id if isinstance(iterable.func, ast.Name) else None
    if name in _WRAPPERS and name != "trange":
        return _range_length(iterable.args[0], scope) if iterable.args else None
    if name not in ("range", "trange") or not 1 <= len(iterable.args) <= 3:
        return None
    bounds = [_integer(argument, scope) for argument in iterable.args]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds) or (len(known) == 3 and known[2] == 0):
        return None
    try:
        length = len(range(*known))
    except OverflowError:
        return None
    return length if 0 < length <= _MAX_TOTAL else None


def _integer(node: ast.expr, scope: Mapping[str, int]) -> int | None:
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        left, right = _integer(node.left, scope), _integer(node.right, scope)
        if left is None or right is None or max(abs(left), abs(right)) > _MAX_TOTAL:
            return None
        if isinstance(node.op, ast.Mult):
            return left * right
        return left + right if isinstance(node.op, ast.Add) else left - right
    return None


def _integers(items: Any) -> dict[str, int]:
    return {name: value for name, value in list(items) if type(value) is int}


def _assigned_integers(tree: ast.Module) -> dict[str, int]:
    """Return the names that top-level statements of the cell set to numbers."""
    return {
        statement.targets[0].id: statement.value.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Constant)
        and type(statement.value.value) is int
    }
