"""Sets whose order is another one on the workers.

The order of text depends on the process, that of numbers on how the set was filled, which a copy does not know.
"""

from __future__ import annotations

import ast
import numbers
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from accel_nb.notebook.cells.reachable_values import first_items, reachable_values

_ORDERED_BY = frozenset({"enumerate", "fromkeys", "iter", "join", "list", "map", "tuple", "zip"})
"""Functions whose result has the order of a set that they are called with."""

_WITHOUT_ORDER = frozenset({"all", "any", "frozenset", "len", "max", "min", "set", "sorted", "sum"})
"""Functions whose result does not depend on the order."""

_NUM_FIRST = 100


class SetOrder:
    """The sets of the notebook that the workers have copies of, whose order is another one there."""

    def __init__(self) -> None:
        # The names of sets of text that the notebook made and the workers have copies of.
        self._of_text: set[str] = set()
        # The names of values that are or hold such sets of numbers, whose copies have another order.
        self._of_numbers: set[str] = set()

    def record_sent(self, names: Iterable[str], namespace: Mapping[str, Any]) -> None:
        """Record names whose values are sent to the workers."""
        for name in names:
            value = namespace.get(name)
            (self._of_text.add if _is_set_of_text(value) else self._of_text.discard)(name)
            is_reordered = any(map(_is_reordered_by_a_copy, _held_sets(value)))
            (self._of_numbers.add if is_reordered else self._of_numbers.discard)(name)

    def record_returned(self, names: Iterable[str]) -> None:
        """Record names whose values have come from the workers, whose order is the one that cells on them see."""
        returned = set(names)
        self._of_text -= returned
        self._of_numbers -= returned

    def describe(self, tree: ast.AST, names: Collection[str]) -> list[str]:
        """Return lines about the sets of a cell's names whose order may have an effect; ``tree`` is the cell's code.

        These are sets of text that the code goes through, since most are only asked whether they contain something,
        and all sets of numbers that copies reorder: they are mostly indices, which functions go through.
        """
        found = self._of_text.intersection(names)
        found = found.intersection(_iterated_names(tree)) if found else found
        lines = [
            f"the set {name} has another order on the workers than in the notebook, as in each process of Python: what "
            f"the cell makes in this order differs. Use sorted({name}) in every cell"
            for name in sorted(found)
        ]
        if holders := sorted(self._of_numbers.intersection(names)):
            lines.append(
                f"sets of numbers in {', '.join(holders)} have another order on the workers than in the notebook, as "
                "it depends on how a set was filled: what the cell makes in this order differs. Go through sorted(...) "
                "of such a set in every cell"
            )
        return lines


def _is_set_of_text(value: Any) -> bool:
    return isinstance(value, set | frozenset) and len(value) > 1 and any(isinstance(item, str) for item in value)


def _held_sets(value: Any) -> Iterator[set[Any] | frozenset[Any]]:
    """Yield the sets that a value is, refers to, or has among its first items: a container may have many thousand."""
    for held in reachable_values([value]):
        if isinstance(held, set | frozenset):
            yield held
        elif isinstance(held, dict | list | tuple):
            yield from (item for item in first_items(held, _NUM_FIRST) if isinstance(item, set | frozenset))


def _is_reordered_by_a_copy(found: set[Any] | frozenset[Any]) -> bool:
    order = list(found)
    return type(found) in (set, frozenset) and all(map(_is_hashed_alike, order)) and list(set(order)) != order


def _is_hashed_alike(item: Any) -> bool:
    """Return whether an item is hashed to the same number in every process."""
    return all(map(_is_hashed_alike, item)) if type(item) is tuple else isinstance(item, numbers.Number)


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
