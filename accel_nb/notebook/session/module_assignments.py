"""The global names that functions of the user's own modules set, or whose objects they change, found in their code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from typing import Any

from accel_nb.notebook.cells.assigned_attributes import find_assigned_attributes
from accel_nb.notebook.session.module_sync import FileStamp, source_file_of, stamp_of
from accel_nb.pool.sync.imported_attributes import MODULE_END, AssignedAttribute


class ModuleAssignments:
    """The global names of modules by module, each file read once."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[FileStamp | None, set[AssignedAttribute]]] = {}
        self._own: list[str] = []
        self._num_modules = 0

    def find_in_process(self) -> set[AssignedAttribute]:
        """Return the attributes of all of the user's modules that this process has imported."""
        if len(sys.modules) != self._num_modules:  # a look at each module takes milliseconds
            self._num_modules = len(sys.modules)
            self._own = [name for name, module in list(sys.modules.items()) if source_file_of(module) is not None]
        return self.find(self._own)

    def find(self, modules: Iterable[str]) -> set[AssignedAttribute]:
        """Return the attributes of the user's modules among ``modules`` that their functions may set or change."""
        found: set[AssignedAttribute] = set()
        for name in modules:
            module = sys.modules.get(name)
            if name == "__main__" or (file := source_file_of(module)) is None:
                continue
            stamp = stamp_of(file)
            if name not in self._found or self._found[name][0] != stamp:
                self._found[name] = stamp, _find_in_file(name, file, vars(module))
            found |= self._found[name][1]
        return found


def _find_in_file(name: str, file: str, namespace: dict[str, Any]) -> set[AssignedAttribute]:
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return set()
    found: set[AssignedAttribute] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names = namespace.keys() - _local_names(function)
            found |= find_assigned_attributes(_AsAttributes(name, names).visit(function))
    return {item for item in found if MODULE_END in item.base and item.name is not None}


def _local_names(function: ast.AST) -> set[str]:
    nodes = list(ast.walk(function))
    shared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return (bound | {node.arg for node in nodes if isinstance(node, ast.arg)}) - shared


class _AsAttributes(ast.NodeTransformer):
    """Replaces global names of a module by attributes of the module."""

    def __init__(self, module: str, names: set[str]) -> None:
        self._root = module + MODULE_END
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replace a global name."""
        if node.id not in self._names:
            return node
        return ast.Attribute(ast.Name(self._root, ast.Load()), node.id, node.ctx)
