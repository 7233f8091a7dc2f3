"""Scripts that a cell runs by ``%run``: their text replaces the magic, so that they run as a part of the cell."""

from __future__ import annotations

import ast
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

_FLAGS = frozenset({"-i", "-e"})
"""Options of ``%run`` that change nothing for a script in a cell, which shares the notebook's names anyway."""


@dataclass(frozen=True, slots=True)
class _Script:
    path: Path
    arguments: tuple[str, ...]

    def to_lines(self) -> list[str]:
        """Return the script's text, after lines that set the attributes of `sys` that ``%run`` sets."""
        folder = str(self.path.resolve().parent)
        return [
            f"__import__('sys').argv = {[str(self.path), *self.arguments]!r}",
            f"__import__('sys').path.insert(0, {folder!r})",
            *self.path.read_text(encoding="utf-8").splitlines(),
            "pass",  # a script shows no value
        ]


def insert_scripts(source: str) -> str:
    """Replace each statement ``%run SCRIPT.py`` of a cell, which IPython has transformed, by the text of the script.

    A statement remains if the file cannot be read or parsed, or if it has other options than ``-i`` and ``-e``: the
    worker's shell runs it, or shows what is wrong with it.
    """
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return source
    lines = source.splitlines()
    for statement in reversed(statements):
        script = _find_script(statement)
        if script is not None and statement.end_lineno is not None:
            try:
                text = script.to_lines()
                ast.parse("\n".join(text))
            except (OSError, SyntaxError, ValueError):
                continue
            lines[statement.lineno - 1 : statement.end_lineno] = text
    return "\n".join(lines) + "\n"


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
