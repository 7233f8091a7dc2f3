"""Conversion between the flags of the magic and the command line, such as ``--gpus 2 --no-panel``, and a layer.

pydantic-settings parses flags with the schema's models. Each flag is parsed separately, so that all mistakes are
reported; the messages are made here.
"""

import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, cast

from accel_nb.config.layers import Layer
from accel_nb.config.message_text import did_you_mean, quoted
from accel_nb.config.schema import OPTIONS, SECTIONS, Config, Option
from accel_nb.secrets import hide_secrets

MAX_LINE = 16_384

_BY_FLAG = {f"--{option.flag}": option for option in OPTIONS.values()}
_NEGATED = {f"--no-{option.flag}": option for option in OPTIONS.values() if option.is_switch}
_KNOWN: Mapping[str, Option] = _BY_FLAG | _NEGATED
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"  # including the dashes that word processors insert for two hyphens


def parse_flags(line: str | Sequence[str], source: str = "magic") -> Layer:
    """Return the flags of a magic's line, or of a list of arguments, as a layer.

    Mistakes of the user do not raise: they are recorded in ``Layer.problems``, and ``resolve`` reports them together
    with values that are not allowed.
    """
    text = line if isinstance(line, str) else " ".join(line)
    bad = next((char for char in text if not char.isprintable() and char != "\t"), None)
    if bad is not None:
        return Layer("flags", {}, source, problems=(f"the flags contain the character {bad!a}; remove it",))
    if len(text) > MAX_LINE:
        return Layer(
            "flags", {}, source, problems=(f"the flags are longer than {MAX_LINE} characters; use --config FILE",)
        )
    try:
        words = shlex.split(without_comment(line)) if isinstance(line, str) else list(line)
    except ValueError:
        return Layer("flags", {}, source, problems=(f"a quotation mark in {quoted(line)} is never closed; close it",))
    parsed = _ParsedFlags()
    parser = _parser() if words else None
    for group in _split_flags(words):
        parsed.add(group, parser)
    return Layer("flags", parsed.values, source, parsed.places, tuple(parsed.problems))


def without_comment(line: str) -> str:
    """Return a line without its comment, which begins with a ``#`` at the start of a word outside of quotes."""
    quote, before, is_escaped = "", " ", False
    for index, char in enumerate(line):
        if char == "#" and not quote and not is_escaped and before.isspace():
            return line[:index]
        if is_escaped:
            is_escaped = False
        elif char == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        before = char
    return line


def flags_to_line(given: Config | Layer) -> str:
    """Return the flags that set these options; for a `Config`, those that differ from their defaults.

    Raises:
        ValueError: if a value cannot be written as a flag, such as text with a line break.
    """
    if isinstance(given, Layer):
        values = dict(given.values)
    else:
        values = given.model_dump(exclude_defaults=True)
    flat: dict[str, Any] = {}
    for name, value in values.items():
        section = cast("dict[str, Any]", value) if isinstance(value, dict) else None
        flat |= {name: value} if section is None else {f"{name}.{leaf}": inner for leaf, inner in section.items()}
    return " ".join(_flag(OPTIONS[name], value) for name, value in flat.items())


def usage(command: str = "%%accelerate") -> str:
    """Return a compact table of every flag, its value, default and meaning."""
    rows = [(_usage_flag(option), option) for option in OPTIONS.values()]
    width = min(40, max(len(flag) for flag, _ in rows))
    lines = [f"{command} [flags]", ""]
    for flag, option in rows:
        default = "" if option.default in (None, ()) else f" (default {value_text(option.default)})"
        lines.append(f"  {flag:<{width}}  {option.field.description}{default}")
    return "\n".join(lines)


@dataclass
class _ParsedFlags:
    """Values, places and problems of the flags that have been parsed."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    places: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[str] = field(default_factory=list[str])

    def add(self, group: list[str], parser: "_Parser | None") -> None:
        """Parse a flag and the words that follow it."""
        name = group[0].partition("=")[0]
        option = _KNOWN.get(name)
        if option is None or parser is None:
            self.problems.append(_unknown_flag_message(group))
            return
        try:
            value = parser.read(group, option)
        except ValueError:
            self.problems.append(_wrong_value_message(group, option))
            return
        place = _display_text(group)
        if option.name in self.values and self.values[option.name] != value:
            self.problems.append(f"{self.places[option.name]} and {place} disagree; remove one of the two")
            return
        self.values[option.name], self.places[option.name] = value, place


class _Parser(Protocol):
    def read(self, group: list[str], option: Option) -> Any:
        """Return the value of one flag; raises ValueError if pydantic-settings rejects it."""
        ...


@cache
def _parser() -> _Parser:
    """Build the parser of pydantic-settings, which takes longer than a small cell."""
    from pydantic_settings import BaseSettings, CliSettingsSource

    class FlagSettings(BaseSettings, Config, enable_decoding=False, defer_build=True):  # pyright: ignore
        """The schema as settings. Lists stay text, which the schema's validators parse."""

    source: CliSettingsSource[Any] = CliSettingsSource(
        FlagSettings,
        cli_prog_name="accelerate",
        cli_parse_none_str="\0",  # the schema parses "none"
        cli_avoid_json=True,
        cli_exit_on_error=False,
        cli_implicit_flags="dual",
        cli_kebab_case=True,
        cli_shortcuts={
            option.name.replace("_", "-"): option.flag
            for option in OPTIONS.values()
            if option.flag != option.name.replace("_", "-") and option.flag not in SECTIONS
        },
    )

    lock = threading.Lock()  # a source keeps its last result

    class Parser:
        def read(self, group: list[str], option: Option) -> Any:
            if option.flag in SECTIONS:  # pydantic-settings interprets such a flag as a value of the whole section
                _, equals, rest = group[0].partition("=")
                group = [f"--{option.name.replace('_', '-')}{equals}{rest}", *group[1:]]
            with lock:
                value: Any = source(args=group)()
            for part in option.name.split("."):
                value = value[part]
            return value

    return Parser()


def _split_flags(words: Sequence[str]) -> list[list[str]]:
    """Split words into groups of a flag and the words that follow it; words before the first flag are a group too."""
    groups: list[list[str]] = []
    for word in words:
        if groups and not _is_flag_like(word):
            groups[-1].append(word)
        else:
            groups.append([word])
    return groups


def _is_flag_like(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit() and word[1:2] != "."


def _unknown_flag_message(group: list[str]) -> str:
    word = group[0].partition("=")[0]
    if word.removeprefix("--") in SECTIONS:
        flags = ", ".join(flag for flag in _BY_FLAG if flag.startswith(f"{word}."))
        return f"{word} is a group of flags{': ' if flags else ' that has none yet'}{flags}; name one of its flags"
    hint = did_you_mean(word.lstrip(_DASHES), _suggestions())
    if word.startswith("--"):
        return f"{quoted(word)} is not a flag{hint or '; the option reference lists all flags'}"
    if word.startswith("-"):
        return f"{quoted(word)} is not a flag{hint}; flags start with two dashes"
    hint = hint if word[:1] in _DASHES or f"--{word}" in _KNOWN else ""
    return f"{' '.join(map(quoted, group))} comes before the first flag{hint}; only flags can be given here"


def _suggestions() -> dict[str, str]:
    by_name = {option.name.replace("_", "-"): f"--{option.flag}" for option in OPTIONS.values()}
    return by_name | {flag[2:]: flag for flag in _KNOWN}


def _wrong_value_message(group: list[str], option: Option) -> str:
    """Return the message about a known flag that pydantic-settings rejected."""
    name, has_value, _ = group[0].partition("=")
    extra = group[1:] if option.is_switch or has_value else group[2:]
    if option.is_switch and has_value:
        return f"{_display_text(group[:1])}: the flag takes no value; write --{option.flag} or --no-{option.flag}"
    if extra:
        words = " ".join(map(quoted, extra))
        flag = _display_text(group[: -len(extra)])
        return f"{words} after {flag} belongs to no flag; remove it, or quote a value with spaces"
    if not option.is_switch and not has_value and len(group) == 1:
        return f"{name} needs a value; give {option.allowed}"
    return f"{_display_text(group)} cannot be read; give {option.allowed}"


def _display_text(group: list[str]) -> str:
    text = " ".join(shlex.quote(word) for word in group)
    text = hide_secrets(text)  # before cutting: a part of a secret is not recognized as one
    return text if len(text) <= 80 else text[:77] + "..."


def _flag(option: Option, value: Any) -> str:
    if option.is_switch and isinstance(value, bool):
        return f"--{option.flag}" if value else f"--no-{option.flag}"
    text = value_text(value)
    if not text.isprintable():
        raise ValueError(f"{option.name}: {value!a} cannot be written as a flag")
    plain = text and not text.startswith("-")
    return f"--{option.flag}{' ' if plain else '='}{shlex.quote(text) if text else ''}"


def value_text(value: Any) -> str:
    """Return a value as the text of a flag."""
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return ",".join(map(str, cast("Sequence[Any]", value)))
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _usage_flag(option: Option) -> str:
    if not option.is_switch:
        return f"--{option.flag} {option.metavar}"
    return f"--[no-]{option.flag}"
