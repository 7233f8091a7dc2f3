"""Calls of the preparation that are inserted into a plain cell, before each statement that could train."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FUNCTION = "__accel_nb_prepare__"
_NOT_TRAINING = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Pass,
    ast.Global,
)


class PrepareInserter(ast.NodeTransformer):
    """Inserts a call of the preparation before each top-level statement that could train."""

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Insert the calls into the body of a cell."""
        body: list[ast.stmt] = []
        for statement in node.body:
            if _could_train(statement):
                prepare_call = ast.Expr(ast.Call(ast.Name(_FUNCTION, ast.Load()), [], []))
                body.append(ast.fix_missing_locations(ast.copy_location(prepare_call, statement)))
            body.append(statement)
        node.body = body
        return node


@contextmanager
def bound_prepare_function(prepare: Callable[[], object]) -> Iterator[None]:
    """Bind ``prepare`` to the builtin that `PrepareInserter` inserts calls of, while the block runs."""

    def prepare_call() -> None:
        __tracebackhide__ = True
        prepare()

    setattr(builtins, _FUNCTION, prepare_call)
    try:
        yield
    finally:
        delattr(builtins, _FUNCTION)


def _could_train(statement: ast.stmt) -> bool:
    """Return whether a statement contains a loop, a ``with`` or a call."""
    if isinstance(statement, _NOT_TRAINING):
        return False
    kinds = ast.For | ast.While | ast.With | ast.AsyncFor | ast.AsyncWith | ast.Call
    return any(isinstance(node, kinds) for node in ast.walk(statement))
