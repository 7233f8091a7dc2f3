"""Writing of the YAML file of options. A file is replaced atomically: after a crash it has the old or the new text."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from accel_nb.config.layers import Layer, Resolved, nested, resolve
from accel_nb.config.message_text import path_text
from accel_nb.config.schema import SCHEMA_VERSION, Config
from accel_nb.config.yaml_documents import dump_yaml
from accel_nb.errors import ConfigError


def write_file(options: Resolved | Config | Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write options as YAML that ``read_file`` can read; of a `Resolved`, write those that a layer sets.

    An existing file is replaced atomically.

    Raises:
        ConfigError: if an option is wrong or the file cannot be written.
    """
    text = to_yaml(options)
    target = Path(path).expanduser().resolve()
    if target.exists() and not target.is_file():
        raise ConfigError(f"{path_text(path)}: is not a plain file; give the path of a file")
    try:
        _replace(target, text)
    except OSError as error:
        raise ConfigError(f"{path_text(path)}: cannot be written ({error.strerror}); choose another place") from error


def to_yaml(options: Resolved | Config | Mapping[str, Any]) -> str:
    """Return options as the text that ``write_file`` writes; raises `ConfigError` if one is wrong."""
    document = {"version": SCHEMA_VERSION, **nested(_json_ready(options))}
    return "# Options of accel_nb; docs/options.md lists them all.\n" + dump_yaml(document)


def _json_ready(options: Resolved | Config | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(options, Config):
        options = options.model_dump(exclude_defaults=True)
    if not isinstance(options, Resolved):
        options = resolve([Layer("file", {**options}, "the options to write")])
    given = {name: value for name, value in options.given.items() if name != "config"}
    return {
        name: [*cast("tuple[Any, ...]", value)] if isinstance(value, tuple) else value for name, value in given.items()
    }


def _replace(target: Path, text: str) -> None:
    temporary = target.with_name(f".accel_nb-{uuid4().hex}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
