"""Sets of text that a cell goes through on the workers: their order is another one in each process."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

_ORDERED_BY = frozenset({"enumerate", "fromkeys", "iter", "join", "list", "map", "tuple", "zip"})
"""Functions whose result has the order of a set that they are called with."""

_WITHOUT_ORDER = frozenset({"all", "any", "frozenset", "len", "max", "min", "set", "sorted", "sum"})
"""Functions whose result does not depend on the order."""


class SetOrder:
    """The sets of the notebook that the workers have copies of, whose order is another one there."""

    def __init__(self) -> None:
        # The names of sets that the notebook made and the workers have copies of.
        self._copied: set[str] = set()

    def record_sent(self, names: Iterable[str], namespace: Mapping[str, Any]) -> None:
        """Record names whose values are sent to the workers."""
        for name in names:
            (self._copied.add if _is_set_of_text(namespace.get(name)) else self._copied.discard)(name)

    def record_returned(self, names: Iterable[str]) -> None:
        """Record names whose values have come from the workers, whose order is the one that cells on them see."""
        self._copied.difference_update(names)

    def describe(self, tree: ast.AST, names: Collection[str]) -> list[str]:
        """Return a line for each of a cell's names whose set it goes through; ``tree`` is the cell's code."""
        if not self._copied.intersection(names):
            return []
        return [
            f"the set {name} has another order on the workers than in the notebook, as in each process of Python: what "
            f"the cell makes in this order differs. Use sorted({name}) in every cell"
            for name in sorted(self._copied.intersection(names, _iterated_names(tree)))
        ]


def _is_set_of_text(value: Any) -> bool:
    return isinstance(value, set | frozenset) and len(value) > 1 and any(isinstance(item, str) for item in value)


def _iterated_names(tree: ast.AST) -> Iterator[str]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.SetComp) or _function_name(node) in _WITHOUT_ORDER:
            continue
        pending.extend(ast.iter_child_nodes(node))
        iterated: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            iterated = [node.iter]
        elif isinstance(node, ast.Starred):
            iterated = [node.value]
        elif isinstance(node, ast.Call) and _function_name(node) in _ORDERED_BY:
            iterated = node.args
        yield from (item.id for item in iterated if isinstance(item, ast.Name))


def _function_name(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
