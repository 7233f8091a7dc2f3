"""Magics that only the notebook has: the source of a cell is changed so that workers have each before calling it.

Workers have IPython's own magics. A function that a cell of the notebook has registered is registered there, the
extension that a magic comes from is loaded, and an alias is replaced by its command.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import IPython.core.magics
from IPython.core.alias import Alias
from IPython.core.magic import MagicAlias, Magics

from accel_nb.errors import MisuseError

_KINDS = {"run_line_magic": "line", "run_cell_magic": "cell"}


def replace_magics(source: str, shell: Any, namespace: Mapping[str, Any]) -> str:
    """Return a cell, which IPython has transformed, with calls of magics that workers lack changed to what works there.

    Raise MisuseError for a magic of the notebook's process. Line numbers stay the same.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    lines = source.encode().splitlines(keepends=True)
    last_first = sorted(_find_calls(tree), key=lambda found: (-found[0].lineno, -found[0].col_offset))
    for call, kind, name, arguments in last_first:
        function = shell.find_magic(name, kind)
        line, own = lines[call.lineno - 1], slice(call.col_offset, call.end_col_offset)
        text = line[own].decode()
        if type(function) is MagicAlias:
            name, arguments = function.magic_name, _with_parameters(arguments, function.magic_params)
            function = shell.find_magic(name, kind)
            text = f"get_ipython().run_{kind}_magic({', '.join(map(repr, [name, *arguments]))})"
        if function is None or call.lineno != call.end_lineno:
            continue
        if not _is_of_ipython(kind, name, function):
            text = _replacement(kind, name, function, arguments[0], shell, namespace, text)
        lines[call.lineno - 1] = line[: own.start] + text.encode() + line[own.stop :]
    return b"".join(lines).decode()


def _with_parameters(arguments: Sequence[str], parameters: str | None) -> list[str]:
    """Return the arguments of a magic that is called by an alias with ``parameters``."""
    line = " ".join(filter(None, [parameters, arguments[0]]))
    return [line, *arguments[1:]]


def _find_calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str, str, list[str]]]:
    """Yield the calls of magics in a cell, each with its kind, its name, and its line and text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KINDS:
            texts = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            if len(texts) == len(node.args) and len(texts) > 1:
                yield node, _KINDS[node.func.attr], texts[0], texts[1:]


def _is_of_ipython(kind: str, name: str, function: Any) -> bool:
    """Return whether workers have a magic of this name, or the notebook's is one of IPython's own."""
    if type(function) is Alias:
        return name in {alias for alias, _ in IPython.core.alias.default_aliases()}  # type: ignore[attr-defined]
    kinds = [item for item in vars(IPython.core.magics).values() if isinstance(item, type) and issubclass(item, Magics)]
    owner = getattr(function, "__module__", None) or type(function).__module__
    return owner.startswith("IPython.core.magics.") or any(name in (item.magics or {}).get(kind, ()) for item in kinds)


def _replacement(
    kind: str, name: str, function: Any, line: str, shell: Any, namespace: Mapping[str, Any], call: str
) -> str:
    """Return the expression that does on a worker what a call of a magic does in the notebook."""
    if type(function) is Alias:
        return f"get_ipython().system({_command_of(function, line)!r})"
    module = getattr(function, "__module__", None) or ""
    package = module.partition(".")[0]
    extension = next((item for item in shell.extension_manager.loaded if item.partition(".")[0] == package), None)
    if extension is not None and package != "accel_nb":
        return f"(get_ipython().extension_manager.load_extension({extension!r}), {call})[1]"
    bound = next((key for key, value in list(namespace.items()) if value is function and not key.startswith("_")), None)
    if bound is None:
        mark = "%" if kind == "line" else "%%"
        raise MisuseError(
            f"{mark}{name} is a magic of the notebook's own process, which workers do not have: use it in a cell "
            "without %%accelerate. One that a cell has registered by @register_line_magic works there if its function "
            "has a name in the notebook"
        )
    return f"(get_ipython().register_magic_function({bound}, {kind!r}, {name!r}), {call})[1]"


def _command_of(alias: Alias, rest: str) -> str:
    """Return the command that an alias runs."""
    recorder = _Recorder()
    recording = copy.copy(alias)
    recording.shell = recorder
    recording(rest)
    return recorder.command


class _Recorder:
    """A shell that runs no command."""

    command = ""

    def system(self, command: str) -> None:
        """Record the command."""
        self.command = command
