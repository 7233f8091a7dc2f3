"""The imports of many cells, moved to the top of one script and sorted as by isort."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence

_Import = ast.Import | ast.ImportFrom
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def hoist_imports(bodies: Sequence[str], needed: Sequence[str]) -> tuple[str, list[str]]:
    """Return top-level imports and the ``needed`` ones as one text, and the bodies without them.

    An import stays in its body where an earlier place could change it or what it binds: if it shares its line with
    another statement, binds a name that was bound before, or follows a statement that may set an import path, an
    environment variable or an option. Definitions and assignments to names do not.
    """
    found: list[_Import] = []
    for line in needed:
        found += [node for node in ast.parse(line).body if isinstance(node, _Import)]
    remaining: list[str] = []
    mover = _ImportMover()
    for body in bodies:
        nodes = mover.choose(ast.parse(body))
        found += nodes
        lines = body.split("\n")
        for node in reversed(nodes):
            del lines[node.lineno - 1 : node.end_lineno]
        remaining.append("\n".join(lines).strip("\n"))
    return _format_imports(found), remaining


class _ImportMover:
    """Chooses the imports to move while it reads a script's parts in order."""

    def __init__(self) -> None:
        # By name, the import that binds it; None for other code.
        self._bound: dict[str, str | None] = {}
        self._is_blocked = False

    def choose(self, tree: ast.Module) -> list[_Import]:
        """Return the top-level imports of the next part that can be moved to the top."""
        used: dict[int, int] = {}
        for node in tree.body:
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                used[line] = used.get(line, 0) + 1
        chosen: list[_Import] = []
        for node in tree.body:
            if isinstance(node, _Import):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if self._can_move(node) and all(used[line] == 1 for line in lines):
                    chosen.append(node)
                self._bound |= _bindings(node)
                self._is_blocked |= "*" in _bindings(node)
            elif isinstance(node, _DEFINITIONS):
                self._bound[node.name] = None
            elif (names := _assigned_names(node)) is not None:
                self._bound |= dict.fromkeys(names)
            else:
                self._is_blocked = True
        return chosen

    def _can_move(self, node: _Import) -> bool:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            return True
        bindings = _bindings(node)
        if self._is_blocked or "*" in bindings:
            return False
        return all(self._bound.get(name, origin) == origin for name, origin in bindings.items())


def _bindings(node: _Import) -> dict[str, str | None]:
    """Return the names that an import binds, each with what it is bound to; ``*`` for names that are not known."""
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
            for alias in node.names
        }
    module = "." * node.level + (node.module or "")
    return {alias.asname or alias.name: f"{module}:{alias.name}" for alias in node.names}


def _assigned_names(node: ast.stmt) -> list[str] | None:
    """Return the names that an assignment binds, none for a lone constant; None for any other statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names: list[str] = []
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        names += [part.id for part in parts if isinstance(part, ast.Name)]
        if not all(isinstance(part, ast.Name) for part in parts):
            return None
    return names or None


def _format_imports(nodes: Sequence[_Import]) -> str:
    plain: dict[str, str] = {}
    names: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                plain[ast.unparse(ast.Import([alias]))] = alias.name
        else:
            module = "." * node.level + (node.module or "")
            names.setdefault(module, set()).update(ast.unparse(alias) for alias in node.names)
    groups: list[list[str]] = [[], [], []]
    for line, module in sorted(plain.items(), key=lambda item: item[1].lower()):
        groups[_group(module)].append(line)
    for module in sorted(names, key=str.lower):
        line = f"from {module} import {', '.join(sorted(names[module], key=_by_kind))}"
        groups[_group(module)].append(line)
    return "\n\n".join("\n".join(group) for group in groups if group)


def _group(module: str) -> int:
    top = module.partition(".")[0]
    return 0 if top == "__future__" else 1 if top in sys.stdlib_module_names else 2


def _by_kind(name: str) -> tuple[int, str]:
    """Return a sort key: constants first, then classes, then other names."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2), name
