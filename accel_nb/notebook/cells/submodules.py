"""The modules that a cell's code uses as attributes of their packages, as in ``sklearn.metrics.f1_score``.

``import sklearn.metrics`` binds the package only. A process that imports the package need not have its submodules.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Mapping
from typing import Any


def find_submodules(tree: ast.Module, namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the imported modules that code uses as attributes of a package that a name refers to."""
    found = (_find_module(node, namespace) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return tuple(dict.fromkeys(module.__name__ for module in found if module is not None))


def _find_module(node: ast.expr, namespace: Mapping[str, Any]) -> types.ModuleType | None:
    if isinstance(node, ast.Name):
        value = namespace.get(node.id)
        return value if isinstance(value, types.ModuleType) else None
    package = _find_module(node.value, namespace) if isinstance(node, ast.Attribute) else None
    if package is None or not isinstance(node, ast.Attribute):
        return None
    value = sys.modules.get(f"{package.__name__}.{node.attr}")
    return value if vars(package).get(node.attr) is value else None
