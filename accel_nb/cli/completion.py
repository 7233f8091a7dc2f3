"""``accel-nb completion bash``: a script that completes commands, flags and values, and starts no Python."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress

from accel_nb.config.layers import did_you_mean
from accel_nb.config.schema import OPTIONS, PLANNED_OPTIONS, PLANNED_VALUES, Option
from accel_nb.errors import ConfigError

SHELLS = ("bash",)
_COMMAND = re.compile(r"^accel-nb (?P<name>[a-z]+)(?: (?P<actions>[a-z]+(?:\|[a-z]+)*))?(?= |$)")
_FLAG = re.compile(r"--[a-z][a-z.-]*")


def run(words: Sequence[str]) -> str:
    """Return the script for a shell; raises `ConfigError` for one that it does not know."""
    from accel_nb.cli.main import HELP

    shell = " ".join(words)
    if shell not in SHELLS:
        near = did_you_mean(shell, SHELLS)
        raise ConfigError(f"accel-nb completion: {shell!a} is no shell{near}; give one of {', '.join(SHELLS)}")
    actions, flags = read_commands(HELP)
    for key in flags:
        flags[key] = sorted({*flags[key], *_FLAG.findall(_help_of(key.split()))})
    return _bash(actions, flags, _values())


def _help_of(command: Sequence[str]) -> str:
    """Return what a command says when it is asked for help; nothing where it has none."""
    from accel_nb.cli.main import main

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(io.StringIO()), suppress(SystemExit):
        main([*command, "--help"])
    return said.getvalue()


def read_commands(text: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return from the help text each command's actions, and the flags of each command, or command and action."""
    actions: dict[str, list[str]] = {}
    flags: dict[str, list[str]] = {}
    for line in text.splitlines():
        found = _COMMAND.match(line)
        if found is None:
            continue
        name, own = found["name"], found["actions"].split("|") if found["actions"] else []
        known = actions.setdefault(name, [])
        known += [action for action in own if action not in known]
        offered = {"--help", *_FLAG.findall(line)}
        if "[flags]" in line:
            offered.update(_all_flags())
        for key in [f"{name} {action}" for action in own] or [name]:
            flags[key] = sorted({*flags.get(key, []), *offered})
    return actions, flags


def _served(option: Option) -> bool:
    return option.name not in PLANNED_OPTIONS


def _all_flags() -> list[str]:
    flags: list[str] = []
    for option in filter(_served, OPTIONS.values()):
        flags.append(f"--{option.flag}")
        if option.is_switch:
            flags.append(f"--no-{option.flag}")
    return flags


def _values() -> dict[str, list[str]]:
    """Return what a flag takes, where that is a choice of words."""
    values: dict[str, list[str]] = {}
    for option in filter(_served, OPTIONS.values()):
        words = [word for word in option.metavar.split("|") if word and word.islower()]
        if len(words) > 1:
            values[f"--{option.flag}"] = [word for word in words if word not in PLANNED_VALUES.get(option.name, ())]
    return values


def _bash(
    actions: Mapping[str, Sequence[str]], flags: Mapping[str, Sequence[str]], values: Mapping[str, Sequence[str]]
) -> str:
    def offer(words: Sequence[str]) -> str:
        return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$word")); return'

    lines = [
        '# Completes accel-nb in bash: eval "$(accel-nb completion bash)"',
        "_accel_nb() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        "    COMPREPLY=()",
        f"    if ((COMP_CWORD == 1)); then {offer([*actions, '--help'])}; fi",
        '    case "$before" in',
        *(f"        {flag}) {offer(words)} ;;" for flag, words in values.items()),
        "    esac",
        '    if [[ "$word" == -* ]]; then',
        '        case "${COMP_WORDS[1]} ${COMP_WORDS[2]}" in',
        *(f"            {shlex.quote(key)}) {offer(words)} ;;" for key, words in flags.items() if " " in key),
        "        esac",
        '        case "${COMP_WORDS[1]}" in',
        *(f"            {key}) {offer(words)} ;;" for key, words in flags.items() if " " not in key),
        "        esac",
        "    elif ((COMP_CWORD == 2)); then",
        '        case "${COMP_WORDS[1]}" in',
        *(f"            {name}) {offer(own)} ;;" for name, own in actions.items() if own),
        "        esac",
        "    fi",
        "}",
        "complete -o default -F _accel_nb accel-nb",
    ]
    return "\n".join(lines) + "\n"
