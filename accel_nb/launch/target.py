"""The target of a launch: found, read and checked without running it."""

from __future__ import annotations

import ast
import json
import os
import stat
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import Any

from accel_nb.config import Layer, check_layer
from accel_nb.config.message_text import did_you_mean, quoted
from accel_nb.errors import ConfigError
from accel_nb.launch.rank_task import Target

MAX_BYTES = 256 * 1024 * 1024
METADATA = "accel_nb"
"""The entry of a notebook's metadata whose ``options`` are the notebook's own."""


def check_target(words: Sequence[str]) -> tuple[Target, Layer | None]:
    """Return the target that the words name, with its arguments, and the options stored in a notebook.

    Raises ConfigError for a target that does not exist, or is neither Python nor a notebook.
    """
    if not words:
        raise ConfigError("accel-nb launch needs a target: a script, -m MODULE, or a notebook")
    if words[0] == "-m":
        if len(words) < 2:
            raise ConfigError("-m needs the name of a module, as in accel-nb launch -m package.train")
        _check_module(words[1])
        return Target("module", words[1], tuple(words[2:])), None
    path, args = words[0], tuple(words[1:])
    text = read_bytes(path)
    if path.endswith(".ipynb"):
        return Target("notebook", path, args), stored_options(read_notebook(text, path), path)
    try:
        ast.parse(text, filename=path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(f"{_printable_path(path)}{line}: is not Python ({reason}); correct it") from None
    return Target("script", path, args), None


def read_notebook(text: bytes | str, path: str) -> Any:
    """Return a notebook in the current format; raise ConfigError for anything else."""
    import nbformat

    try:
        notebook: Any = nbformat.reads(text if isinstance(text, str) else text.decode(), as_version=4)
        nbformat.validate(notebook)
    except Exception as error:  # the library may raise anything for a malformed file
        reason = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(
            f"{_printable_path(path)}: is not a notebook ({ascii(reason)[1:-1]}); save it again"
        ) from None
    language = notebook.metadata.get("kernelspec", {}).get("language", "python")
    if str(language).lower() != "python":
        raise ConfigError(f"{_printable_path(path)}: is a notebook in {quoted(language)}; only Python's are launched")
    return notebook


def stored_options(notebook: Any, path: str) -> Layer | None:
    """Return the options in a notebook's metadata; raise ConfigError if one of them is wrong."""
    stored: Any = notebook.metadata.get(METADATA)
    options: Any = stored.get("options") if isinstance(stored, dict) else stored
    if options is None:
        return None
    source = f"{_printable_path(path)}, metadata"
    if not isinstance(options, dict):
        raise ConfigError(f"{source}: {METADATA}.options is not a table of options; correct or remove it")
    layer = Layer("notebook", json.loads(json.dumps(options)), source)
    check_layer(layer)
    return layer


def read_bytes(path: str) -> bytes:
    """Return the content of a regular file; raise ConfigError for anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a FIFO must not wait for a writer
    except (OSError, ValueError) as error:
        suggestion = "" if os.sep in path else did_you_mean(path, _scripts_here())
        reason = getattr(error, "strerror", None) or "not a path"
        raise ConfigError(
            f"{_printable_path(path)}: cannot be read ({reason}){suggestion or '; give a script or notebook'}"
        ) from None
    try:
        mode, size = os.fstat(handle).st_mode, os.fstat(handle).st_size
        if not stat.S_ISREG(mode):
            kind = "is a folder" if stat.S_ISDIR(mode) else "is not a plain file"
            raise ConfigError(f"{_printable_path(path)}: {kind}; give a script or notebook")
        if size > MAX_BYTES:
            raise ConfigError(
                f"{_printable_path(path)}: is larger than {MAX_BYTES // 2**20} MiB; give a script or notebook"
            )
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise ConfigError(
            f"{_printable_path(path)}: cannot be read ({error.strerror}); give a script or notebook"
        ) from None
    finally:
        os.close(handle)


def _check_module(name: str) -> None:
    """Find a module without importing its packages."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"-m {quoted(name)} is not a module's name; write it as in -m package.train")
    search_path: Any = [os.getcwd(), *sys.path[1:]]
    for index, part in enumerate(parts):
        spec = PathFinder.find_spec(".".join(parts[: index + 1]), search_path)
        if spec is None and index == 0:  # as packages that are installed editable
            found = (find(part, None) for finder in sys.meta_path if (find := getattr(finder, "find_spec", None)))
            spec = next(filter(None, found), None)
        if spec is None:
            where = "here or among the installed packages" if index == 0 else f"in {'.'.join(parts[:index])}"
            raise ConfigError(f"-m {name}: there is no module {part} {where}; correct the name")
        search_path = spec.submodule_search_locations
        if search_path is None and index < len(parts) - 1:
            raise ConfigError(f"-m {name}: {'.'.join(parts[: index + 1])} is not a package; correct the name")
    if search_path is not None and PathFinder.find_spec(f"{name}.__main__", list(search_path)) is None:
        raise ConfigError(f"-m {name} is a package without __main__.py; name a module of it")


def _scripts_here() -> list[str]:
    try:
        return [name for name in os.listdir() if name.endswith((".py", ".ipynb"))][:1000]
    except OSError:
        return []


def _printable_path(path: str) -> str:
    text = path if path.isprintable() else ascii(path)
    return text if len(text) <= 300 else "..." + text[-297:]
