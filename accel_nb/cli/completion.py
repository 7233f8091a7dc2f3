"""``accel-nb completion bash|zsh|fish``: a shell script that completes commands, flags and values.

The script contains all words, so completing starts no Python.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from accel_nb.cli.parser import CommandParser
from accel_nb.config.message_text import did_you_mean
from accel_nb.config.schema import OPTIONS, PLANNED_VALUES
from accel_nb.errors import ConfigError

_COMMAND = re.compile(r"^accel-nb (?P<name>[a-z][a-z-]*)(?: (?P<actions>[a-z]+(?:\|[a-z]+)*))?(?= |$)")
_FLAG = re.compile(r"--[a-z][a-z.-]*")


def run(words: Sequence[str]) -> str:
    """Return the script for a shell. Raise `ConfigError` for an unknown shell."""
    from accel_nb.cli.main import HELP

    description = "Print a script that completes commands in a shell."
    parser = CommandParser(prog="accel-nb completion", description=description)
    parser.add_argument("shell", metavar="|".join(SCRIPT_WRITERS))
    shell = parser.parse_args(words).shell
    if shell not in SCRIPT_WRITERS:
        suggestion = did_you_mean(shell, list(SCRIPT_WRITERS))
        raise ConfigError(
            f"accel-nb completion: {shell!a} is not a shell{suggestion}; give one of {', '.join(SCRIPT_WRITERS)}"
        )
    actions, flags = read_commands(HELP)
    for key in flags:
        flags[key] = sorted({*flags[key], *_FLAG.findall(_help_text(key.split()))})
    return SCRIPT_WRITERS[shell](actions, flags, _values())


def _help_text(command: Sequence[str]) -> str:
    """Return the help text of a command; empty if it has none."""
    from accel_nb.cli.main import main

    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(io.StringIO()), suppress(SystemExit):
        main([*command, "--help"])
    return output.getvalue()


def read_commands(text: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Parse the help text; return the actions of each command, and the flags of each command and action."""
    actions: dict[str, list[str]] = {}
    flags: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = _COMMAND.match(line)
        if match is None:
            continue
        name, line_actions = match["name"], match["actions"].split("|") if match["actions"] else []
        known_actions = actions.setdefault(name, [])
        known_actions += [action for action in line_actions if action not in known_actions]
        line_flags = {"--help", *_FLAG.findall(line)}
        if "[flags]" in line:
            line_flags.update(_all_flags())
        for key in [f"{name} {action}" for action in line_actions] or [name]:
            flags[key] = sorted({*flags.get(key, []), *line_flags})
    return actions, flags


def _all_flags() -> list[str]:
    flags: list[str] = []
    for option in OPTIONS.values():
        flags.append(f"--{option.flag}")
        if option.is_switch:
            flags.append(f"--no-{option.flag}")
    return flags


def _values() -> dict[str, list[str]]:
    """Return the values of each flag that accepts one of several words."""
    values: dict[str, list[str]] = {}
    for option in OPTIONS.values():
        words = [word for word in option.metavar.split("|") if word and word.islower()]
        if len(words) > 1:
            values[f"--{option.flag}"] = [word for word in words if word not in PLANNED_VALUES.get(option.name, ())]
    return values


Table = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class _ShellSyntax:
    """The parts of a completion script in which bash and zsh differ."""

    head: Sequence[str]
    position: str
    """An expression for the number of words before the one to complete."""
    words: Sequence[str]
    """Expressions for the first two words after the program's name."""
    offer: str
    """The statement that completes to one of the words ``%s`` and returns."""
    tail: Sequence[str]


_BASH = _ShellSyntax(
    (
        '# Completes accel-nb in bash: eval "$(accel-nb completion bash)"',
        "_accel_nb() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        "    COMPREPLY=()",
    ),
    "COMP_CWORD",
    ("${COMP_WORDS[1]}", "${COMP_WORDS[2]}"),
    'COMPREPLY=($(compgen -W "%s" -- "$word")); return',
    ("}", "complete -o default -F _accel_nb accel-nb"),
)
_ZSH = _ShellSyntax(
    (
        "#compdef accel-nb",
        '# Completes accel-nb in zsh, after compinit: eval "$(accel-nb completion zsh)"',
        "_accel_nb() {",
        '    local word="${words[CURRENT]}" before="${words[CURRENT-1]}"',
    ),
    "CURRENT - 1",
    ("${words[2]}", "${words[3]}"),
    "compadd -- %s; return",
    ("    _files", "}", "compdef _accel_nb accel-nb"),
)


def _posix_script(syntax: _ShellSyntax, actions: Table, flags: Table, values: Table) -> str:
    def cases(subject: str, table: Table, indent: str) -> list[str]:
        rows = [f"{indent}    {shlex.quote(key)}) {syntax.offer % ' '.join(words)} ;;" for key, words in table.items()]
        return [f'{indent}case "{subject}" in', *rows, f"{indent}esac"]

    first, second = syntax.words
    lines = [
        *syntax.head,
        f"    if (({syntax.position} == 1)); then {syntax.offer % ' '.join([*actions, '--help'])}; fi",
        *cases("$before", values, "    "),
        '    if [[ "$word" == -* ]]; then',
        *cases(f"{first} {second}", _flags_of_actions(flags), "        "),
        *cases(first, _flags_of_commands(flags), "        "),
        f"    elif (({syntax.position} == 2)); then",
        *cases(first, {name: own for name, own in actions.items() if own}, "        "),
        "    fi",
        *syntax.tail,
    ]
    return "\n".join(lines) + "\n"


def _fish_script(actions: Table, flags: Table, values: Table) -> str:
    def offer(words: Sequence[str]) -> str:
        return f"printf '%s\\n' {' '.join(words)}; return"

    def cases(subject: str, table: Table, indent: str) -> list[str]:
        rows = [f"{indent}    case {shlex.quote(key)}; {offer(words)}" for key, words in table.items()]
        return [f'{indent}switch "{subject}"', *rows, f"{indent}end"]

    lines = [
        "# Completes accel-nb in fish: accel-nb completion fish | source",
        "function __accel_nb",
        "    set -l words (commandline -opc)",
        "    set -l word (commandline -ct)",
        f"    if test (count $words) -eq 1; {offer([*actions, '--help'])}; end",
        *cases("$words[-1]", values, "    "),
        "    if string match -q -- '-*' $word",
        *cases("$words[2] $words[3]", _flags_of_actions(flags), "        "),
        *cases("$words[2]", _flags_of_commands(flags), "        "),
        "    else if test (count $words) -eq 2",
        *cases("$words[2]", {name: own for name, own in actions.items() if own}, "        "),
        "    end",
        "    __fish_complete_path $word",
        "end",
        "complete -c accel-nb -f -a '(__accel_nb)'",
    ]
    return "\n".join(lines) + "\n"


def _flags_of_actions(flags: Table) -> Table:
    return {key: words for key, words in flags.items() if " " in key}


def _flags_of_commands(flags: Table) -> Table:
    return {key: words for key, words in flags.items() if " " not in key}


SCRIPT_WRITERS: Mapping[str, Callable[[Table, Table, Table], str]] = MappingProxyType(
    {"bash": partial(_posix_script, _BASH), "zsh": partial(_posix_script, _ZSH), "fish": _fish_script}
)
"""The function that returns a shell's script, by shell; arguments are actions, flags, and values of flags."""
