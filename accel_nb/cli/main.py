"""``accel-nb checkpoint|config|demo|doctor|test``. Exit status: 0 done, 1 failed, 2 bad input (one line a problem)."""

import sys
from collections.abc import Callable, Sequence

from accel_nb.cli import checkpoint, demo, selftest
from accel_nb.config import environment_layer, parse_flags, resolve, usage
from accel_nb.config.export import options_markdown, schema_json
from accel_nb.config.layers import did_you_mean
from accel_nb.errors import CheckpointError, ConfigError, MisuseError
from accel_nb.notebook.doctor import report
from accel_nb.runtime.environment import option_variables

HELP = """\
accel-nb checkpoint inspect|verify|merge|reshard PATH   look into checkpoints and convert them
accel-nb config show [flags]   every option, its value and where it came from
accel-nb config schema         the JSON Schema of the options
accel-nb config docs           the option reference as Markdown
accel-nb config flags          every flag in one table
accel-nb demo                  run the quickstart notebook into out/demo (--notebook PATH, --out DIR)
accel-nb doctor                what was found on this machine, and what will bite
accel-nb test                  check training on this machine's own devices (--gpus N, --cpus N, --timeout S, --json)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("--help", "-h", "help"):
        print(HELP)
        return 0
    try:
        command, arguments = _command(words)
        print(command(arguments), end="")
    except (ConfigError, CheckpointError, MisuseError) as error:
        print(error, file=sys.stderr)
        return 2
    except demo.DemoFailed as error:
        print(error, file=sys.stderr)
        return 1
    except selftest.SelfTestFailed as error:
        print(error)
        return 1
    return 0


def _command(words: Sequence[str]) -> tuple[Callable[[Sequence[str]], str], Sequence[str]]:
    """Return what to run and its arguments."""
    group, action = words[0], " ".join(words[1:2])
    if group == "demo":
        return demo.run, words[1:]
    if group == "checkpoint":
        return checkpoint.run, words[1:]
    if group == "test":
        return selftest.run, words[1:]
    if group == "doctor":
        return _alone(report), words[1:]
    if group != "config":
        near = did_you_mean(group, ["checkpoint", "config", "demo", "doctor", "test"])
        raise ConfigError(f"{group!a} is no command{near}; accel-nb --help lists them")
    if action not in _CONFIG_COMMANDS:
        choices = ", ".join(_CONFIG_COMMANDS)
        given = f"{action!a} is no command of config" if action else "config needs a command"
        raise ConfigError(f"{given}{did_you_mean(action, list(_CONFIG_COMMANDS))}; give one of {choices}")
    return _CONFIG_COMMANDS[action], words[2:]


def _show(words: Sequence[str]) -> str:
    resolved = resolve([environment_layer(option_variables()), parse_flags(words, source="command line")])
    return resolved.table() + "\n"


def _alone(text: Callable[[], str]) -> Callable[[Sequence[str]], str]:
    def run(words: Sequence[str]) -> str:
        if words:
            raise ConfigError(f"{' '.join(words)!a}: the command takes no arguments; remove them")
        return text()

    return run


_CONFIG_COMMANDS: dict[str, Callable[[Sequence[str]], str]] = {
    "show": _show,
    "schema": _alone(schema_json),
    "docs": _alone(options_markdown),
    "flags": _alone(lambda: usage("accel-nb config show") + "\n"),
}
