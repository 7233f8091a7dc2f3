"""The imports of many cells, moved to the top of one script and sorted as by isort."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence


def hoist_imports(bodies: Sequence[str], needed: Sequence[str]) -> tuple[str, list[str]]:
    """Return all top-level imports and the ``needed`` ones as one text, and the bodies without them.

    An import that shares its line with another statement stays in its body.
    """
    found: list[ast.Import | ast.ImportFrom] = []
    for line in needed:
        found += [node for node in ast.parse(line).body if isinstance(node, ast.Import | ast.ImportFrom)]
    remaining: list[str] = []
    for body in bodies:
        nodes = _separate_imports(ast.parse(body))
        found += nodes
        lines = body.split("\n")
        for node in reversed(nodes):
            del lines[node.lineno - 1 : node.end_lineno]
        remaining.append("\n".join(lines).strip("\n"))
    return _format_imports(found), remaining


def _separate_imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """Return the top-level imports that share no line with another statement."""
    used: dict[int, int] = {}
    for node in tree.body:
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            used[line] = used.get(line, 0) + 1
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return [node for node in imports if all(used[line] == 1 for line in range(node.lineno, (node.end_lineno or 0) + 1))]


def _format_imports(nodes: Sequence[ast.Import | ast.ImportFrom]) -> str:
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
