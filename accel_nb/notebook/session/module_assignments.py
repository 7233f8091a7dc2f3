"""The global names that functions of the user's own modules set, or whose objects they change, found in their code."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from accel_nb.notebook.cells.assigned_attributes import find_in_nodes
from accel_nb.notebook.session.module_sync import FileStamp, source_file_of, stamp_of
from accel_nb.pool.sync.imported_attributes import ITSELF, MODULE_END, AssignedAttribute
from accel_nb.runtime.process.user_code import is_user_module

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class ModuleAssignments:
    """The global names of modules by module, each file read once."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[FileStamp | None, set[AssignedAttribute]]] = {}
        self._own: list[str] = []
        # How many modules were imported at the last look at them, and the newest one.
        self._present = (0, "")

    def find_in_process(self) -> set[AssignedAttribute]:
        """Return the attributes of all of the user's modules that this process has imported."""
        present = len(sys.modules), next(reversed(sys.modules))
        if present != self._present:  # a look at each module takes milliseconds
            self._present = present
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
    for function in _Scope(tree).functions:
        found |= _find_in_function(function, namespace.keys(), name + MODULE_END)
    own = {item for item in found if MODULE_END in item.base and item.name is not None}
    return {item for item in own if item.name != ITSELF or not _is_in_library(item, namespace)}


def _is_in_library(attribute: AssignedAttribute, namespace: dict[str, Any]) -> bool:
    """Return whether an attribute is that of an installed library's module, as in ``np.random.shuffle``."""
    _, root, *_ = attribute.base.rpartition(MODULE_END)[2].split(".")
    value = namespace.get(root)
    return isinstance(value, types.ModuleType) and not is_user_module(value.__name__)


class _Scope:
    """The nodes of a module or a function, without the nodes of inner functions, which are separate scopes."""

    def __init__(self, root: ast.AST) -> None:
        self.nodes: list[ast.AST] = [root]
        self.functions: list[ast.AST] = []
        for node in self.nodes:
            for child in ast.iter_child_nodes(node):
                (self.functions if isinstance(child, _FUNCTIONS) else self.nodes).append(child)


def _find_in_function(function: ast.AST, names: AbstractSet[str], module: str) -> set[AssignedAttribute]:
    """Find the attributes that a function sets, if ``names`` are the global names that its surroundings can use."""
    scope = _Scope(function)
    local: set[str] = set()
    shared: set[str] = set()
    for node in scope.nodes:
        if isinstance(node, ast.Global):
            shared.update(node.names)
        elif isinstance(node, ast.arg):
            local.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            local.add(node.id)
    names = names - (local - shared) | shared
    found = find_in_nodes(scope.nodes, names, module)
    for inside in scope.functions:
        found |= _find_in_function(inside, names, module)
    return found
