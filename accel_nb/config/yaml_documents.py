"""Reader of YAML documents from untrusted sources.

Only yaml's safe loader is used, with the scalar types of YAML 1.2 (``no`` is text, not false). Tags, anchors and
aliases are not allowed, since no file of options needs them. yaml is imported on first use, since most runs read no
file.
"""

import os
import re
import stat
from collections.abc import Iterable
from typing import Any, cast

from accel_nb.config.message_text import path_text, quoted
from accel_nb.config.schema import SCHEMA_VERSION, SECTIONS
from accel_nb.errors import ConfigError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 8


def read_options(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Return the values of a file of options, the line of each by name, and the problems of the whole file.

    Values are not checked against the schema. Raises `ConfigError` if the file cannot be read.
    """
    source = os.fspath(path)
    text = _read_text(source)
    try:
        values, places = _parse(text, source)
    except _Refused as error:
        raise ConfigError(f"{path_text(source)}: {error}") from None
    problems = _check_version(values, source)
    if not values and "version" not in places:
        problems.append(
            f"{path_text(source)}: holds no options; write one, such as 'accumulate: 4', or remove --config"
        )
    return values, places, tuple(problems)


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the mapping in another program's YAML file, with the same restrictions as a file of options.

    Raises:
        ConfigError: if the file cannot be read or is not a mapping.
    """
    source = os.fspath(path)
    try:
        return _parse(_read_text(source), source)[0]
    except _Refused as error:
        raise ConfigError(f"{path_text(source)}: {error}") from None


def dump_yaml(document: dict[str, Any]) -> str:
    """Return a document as YAML text that `read_options` can read."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """A dumper that quotes text that YAML 1.1 or 1.2 would parse as another type."""

    _add_scalar_types(Dumper)
    return yaml.dump(document, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _read_text(source: str) -> str:
    advice = "give the path of a YAML file"
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        handle = os.open(os.path.expanduser(source), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise ConfigError(f"{path_text(source)}: cannot be read ({reason}); {advice}") from None
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            kind = "is a folder" if stat.S_ISDIR(mode) else "is not a plain file"
            raise ConfigError(f"{path_text(source)}: {kind}; {advice}")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path_text(source)}: cannot be read ({error.strerror}); {advice}") from None
    finally:
        os.close(handle)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path_text(source)}: is larger than {MAX_BYTES // 1024} KiB; give a file of options")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path_text(source)}: byte {error.start} is not UTF-8; save the file as UTF-8") from None


class _Refused(Exception):
    """A file has content that is not allowed; the message contains the line and the remedy."""


def _parse(text: str, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the document's values and, for each option and section, its line."""
    import yaml

    try:
        _check_events(text)
        loader = _loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise _Refused("holds a list or a single value; write options as 'name: value' lines")
        places: dict[str, str] = {}
        _record_lines(node, "", places, source)
        return loader.construct_document(node), places
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise _Refused(f"{line}is not YAML ({error.problem}); correct the line") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = "a character that YAML does not allow" if isinstance(error, yaml.YAMLError) else "an invalid value"
        raise _Refused(f"is not YAML ({reason}); correct the file") from None


def _check_events(text: str) -> None:
    """Raise `_Refused` for content that is expensive or ambiguous to parse, before any value is constructed."""
    import yaml

    depth = documents = 0
    events = cast("Iterable[Any]", yaml.parse(text, Loader=yaml.SafeLoader))  # pyright: ignore[reportUnknownMemberType]
    for event in events:
        line = f"line {event.start_mark.line + 1}"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _Refused(f"{line}: anchors and aliases are not allowed; write the whole value")
        if getattr(event, "tag", None):
            raise _Refused(f"{line}: tags such as {quoted(event.tag)} are not allowed; write a plain value")
        if depth > MAX_DEPTH:
            raise _Refused(f"{line}: is nested deeper than {MAX_DEPTH}; write options as 'name: value' lines")
        if documents > 1:
            raise _Refused(f"{line}: a second document starts; the file must have one only")


def _record_lines(node: Any, prefix: str, places: dict[str, str], source: str) -> None:
    """Record the line of every name in ``places``; raise `_Refused` for a name that occurs twice."""
    for key, value in node.value:
        line = key.start_mark.line + 1
        name = prefix + str(key.value)
        if name in places:
            raise _Refused(f"line {line}: {quoted(name)} is set twice, before in {places[name]}; remove one")
        places[name] = f"{path_text(source)}, line {line}"
        if key.value in SECTIONS and not prefix and hasattr(value, "value") and value.id == "mapping":
            _record_lines(value, f"{name}.", places, source)


# YAML 1.2's core schema: only true and false are booleans; no dates, no base-60 numbers, no octal 010.
_SCALAR_TYPES = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]{1,20}", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


def _add_scalar_types(loader_or_dumper: Any) -> None:
    for name, (pattern, first) in _SCALAR_TYPES.items():
        resolver = re.compile(f"(?:{pattern})\\Z")
        loader_or_dumper.add_implicit_resolver(f"tag:yaml.org,2002:{name}", resolver, [*first, ""])


def _loader(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {}

    _add_scalar_types(Loader)
    Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
    return Loader(text)


def _check_version(values: dict[Any, Any], source: str) -> list[str]:
    """Remove ``version`` from the values and return its problems."""
    version = values.pop("version", SCHEMA_VERSION)
    if isinstance(version, int) and not isinstance(version, bool) and version >= 1:
        if version > SCHEMA_VERSION:
            return [
                f"{path_text(source)}: has version {version}, written by a newer accel_nb; this version reads up to "
                f"{SCHEMA_VERSION}; update accel_nb"
            ]
        return []
    return [f"{path_text(source)}: version is {quoted(version)}; give {SCHEMA_VERSION} or remove the line"]
