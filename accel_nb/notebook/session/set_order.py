"""Sets whose iteration order differs between the workers and the notebook.

The order of strings depends on the hash seed of the process, that of numbers on the order in which they were added.
"""

from __future__ import annotations

import ast
import itertools
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
    """The sets of the notebook whose copies on the workers have another order."""

    def __init__(self, *, has_same_hashes: bool) -> None:
        """``has_same_hashes``: strings have the same hashes on the workers, as with PYTHONHASHSEED."""
        self._has_same_hashes = has_same_hashes
        # The names of sets of strings that the notebook made and the workers have copies of.
        self._string_sets: set[str] = set()
        # The names of strings, and of containers of strings, from which a cell may make sets.
        self._string_values: set[str] = set()
        # The names of values with sets that a copy reorders, although their items have the same hashes on the workers.
        self._reordered_sets: set[str] = set()

    def record_sent(self, names: Iterable[str], namespace: Mapping[str, Any]) -> None:
        """Record names whose values are sent to the workers."""
        for name in names:
            value = namespace.get(name)
            differs = not self._has_same_hashes
            (self._string_sets.add if differs and _is_set_of_strings(value) else self._string_sets.discard)(name)
            (self._string_values.add if differs and _has_strings(value) else self._string_values.discard)(name)
            is_reordered = any(map(self._is_reordered_by_copy, _contained_sets(value)))
            (self._reordered_sets.add if is_reordered else self._reordered_sets.discard)(name)

    def record_returned(self, names: Iterable[str]) -> None:
        """Record names whose values were returned by the workers, in the order that later cells there iterate."""
        returned = set(names)
        self._string_sets -= returned
        self._string_values -= returned
        self._reordered_sets -= returned

    def describe(self, tree: ast.AST, names: Collection[str]) -> list[str]:
        """Return lines about the sets of a cell's names whose order may have an effect; ``tree`` is the cell's code.

        These are the sets of strings that the code iterates over (most are only used for ``in``), and all sets of
        numbers that copies reorder (most are indices, over which functions iterate). They include sets that the code
        itself makes from strings of the notebook.
        """
        found = self._string_sets.intersection(names)
        found = found.intersection(_iterated_names(tree)) if found else found
        made = self._string_values.intersection(names)
        made = made.intersection(_names_in_iterated_sets(tree)) if made else made
        lines = [
            f"the set {name} has another order on the workers than in the notebook, as in each process of Python: "
            f"results that depend on the order differ. Use sorted({name}) in every cell"
            for name in sorted(found)
        ]
        lines += [
            f"sets of the text in {name} have another order on the workers than in the notebook, as in each process of "
            "Python: results that depend on the order differ. Iterate over sorted(...) of such a set in every cell"
            for name in sorted(made)
        ]
        if holders := sorted(self._reordered_sets.intersection(names)):
            kind = "sets" if self._has_same_hashes else "sets of numbers"
            lines.append(
                f"{kind} in {', '.join(holders)} have another order on the workers than in the notebook, as "
                "it depends on the order in which items were added: results that depend on it differ. Iterate over "
                "sorted(...) of such a set in every cell"
            )
        return lines

    def _is_reordered_by_copy(self, items: set[Any] | frozenset[Any]) -> bool:
        order = list(items)
        return type(items) in (set, frozenset) and all(map(self._has_same_hash, order)) and list(set(order)) != order

    def _has_same_hash(self, item: Any) -> bool:
        """Return whether an item has the same hash on the workers."""
        if type(item) is tuple:
            return all(map(self._has_same_hash, item))
        return isinstance(item, numbers.Number) or (self._has_same_hashes and isinstance(item, str | bytes))


def _is_set_of_strings(value: Any) -> bool:
    return isinstance(value, set | frozenset) and len(value) > 1 and any(isinstance(item, str) for item in value)


def _has_strings(value: Any) -> bool:
    """Return whether a value is a string, or has strings among its first items or those of its first item."""
    if isinstance(value, str):
        return len(value) > 1
    first = _first_parts(value)
    return any(isinstance(item, str) for item in (*first, *_first_parts(next(iter(first), None))))


def _first_parts(value: Any) -> list[Any]:
    keys = itertools.islice(dict[Any, Any].keys(value), _NUM_FIRST) if isinstance(value, dict) else ()
    return [*keys, *first_items(value, _NUM_FIRST)]


def _contained_sets(value: Any) -> Iterator[set[Any] | frozenset[Any]]:
    """Yield the sets that a value is, refers to, or has among its first items: containers may be long."""
    for item in reachable_values([value]):
        if isinstance(item, set | frozenset):
            yield item
        elif isinstance(item, dict | list | tuple):
            yield from (item for item in first_items(item, _NUM_FIRST) if isinstance(item, set | frozenset))


def _iterated_names(tree: ast.AST) -> Iterator[str]:
    return (item.id for item in _iterated(tree) if isinstance(item, ast.Name))


def _names_in_iterated_sets(tree: ast.AST) -> Iterator[str]:
    """Yield the names from which code makes sets over which it iterates, directly or through a variable."""
    bound = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _makes_set(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for item in _iterated(tree):
        made = bound.get(item.id) if isinstance(item, ast.Name) else item
        if made is not None and _makes_set(made):
            yield from (node.id for node in ast.walk(made) if isinstance(node, ast.Name))


def _makes_set(node: ast.expr) -> bool:
    return isinstance(node, ast.SetComp) or _function_name(node) in ("set", "frozenset")


def _iterated(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions over which code iterates, except in functions whose result does not depend on the order."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.SetComp) or _function_name(node) in _WITHOUT_ORDER:
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.For | ast.comprehension):
            yield node.iter
        elif isinstance(node, ast.Starred):
            yield node.value
        elif isinstance(node, ast.Call) and _function_name(node) in _ORDERED_BY:
            yield from node.args


def _function_name(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
