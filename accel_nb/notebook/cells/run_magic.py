"""Scripts that a cell runs by ``%run``: their text replaces the magic, so that they run as a part of the cell."""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from accel_nb.notebook.cells.future_imports import find_future_imports, future_flags

_FLAGS = frozenset({"-i", "-e"})
"""Options of ``%run`` that change nothing for a script in a cell, which shares the notebook's names anyway."""


@dataclass(frozen=True, slots=True)
class _Script:
    path: Path
    arguments: tuple[str, ...]

    def to_lines(self) -> tuple[list[str], int]:
        """Return the script's text, and the compiler flags of its imports from ``__future__``, which are left out.

        The text is between lines that set and restore the attributes of `sys` that ``%run`` sets. Raise OSError,
        SyntaxError or ValueError if the file cannot be read or parsed.
        """
        text = self.path.read_text(encoding="utf-8")
        lines, tree = _lines_of(text), ast.parse(text)
        for node in find_future_imports(tree):  # they would have to be the first lines of the cell
            own = slice(node.lineno - 1, node.end_lineno)
            if "\n".join(lines[own]) != ast.get_source_segment(text, node):
                raise ValueError("the import shares its line with another statement")
            lines[own] = [""] * len(lines[own])
        folder = str(self.path.resolve().parent)
        before = [
            f"__import__('sys').argv = {[str(self.path), *self.arguments]!r}",
            f"__import__('sys').path.insert(0, {folder!r})",
        ]
        after = [
            f"__import__('sys').argv = {sys.argv!r}",
            f"if {folder!r} in __import__('sys').path: __import__('sys').path.remove({folder!r})",
            "pass",  # a script shows no value
        ]
        return [*before, *lines, *after], future_flags(tree)


def insert_scripts(source: str) -> tuple[str, int]:
    """Replace each statement ``%run SCRIPT.py`` of a cell, which IPython has transformed, by the text of the script.

    A statement remains if the file cannot be read or parsed, or if it has other options than ``-i`` and ``-e``: the
    worker's shell runs it, or shows what is wrong with it. Return the source, and the compiler flags of the scripts.
    """
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return source, 0
    lines, flags = _lines_of(source), 0
    for statement in reversed(statements):
        script = _find_script(statement)
        if script is not None and statement.end_lineno is not None:
            try:
                text, own_flags = script.to_lines()
            except (OSError, SyntaxError, ValueError):
                continue
            lines[statement.lineno - 1 : statement.end_lineno] = text
            flags |= own_flags
    return "\n".join(lines), flags


def _lines_of(source: str) -> list[str]:
    """Return the lines of a source as Python counts them: strings in it may contain other line ends."""
    return re.split("\r\n|\r|\n", source)


def _find_script(statement: ast.stmt) -> _Script | None:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or getattr(call.func, "attr", None) != "run_line_magic":
        return None
    texts = [item.value for item in call.args if isinstance(item, ast.Constant)]
    if len(texts) != 2 or texts[0] != "run" or not isinstance(texts[1], str):
        return None
    try:
        words = shlex.split(texts[1])
    except ValueError:
        return None
    options = [word for index, word in enumerate(words) if all(w.startswith("-") for w in words[: index + 1])]
    names = words[len(options) :]
    if not names or not _FLAGS.issuperset(options):
        return None
    path = Path(os.path.expanduser(names[0]))
    if path.suffix != ".py":
        path = path.with_name(f"{path.name}.py")
    return _Script(path, tuple(names[1:]))
