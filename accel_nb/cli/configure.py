"""``accel-nb config``: show options, create or import an options file, show DeepSpeed's configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from accel_nb.cli.parser import CommandParser, parse_with_options
from accel_nb.config import environment_layer, parse_flags, resolve, usage
from accel_nb.config.export import options_markdown, schema_json
from accel_nb.config.message_text import did_you_mean
from accel_nb.errors import ConfigError
from accel_nb.runtime.process.environment import option_variables


def run(words: Sequence[str]) -> str:
    """Run one of the commands and return its output. Raise `ConfigError` for wrong arguments and invalid files."""
    action = " ".join(words[:1])
    if action in ("-h", "--help"):
        return f"usage: accel-nb config {'|'.join(_COMMANDS)} ...\n"
    if action not in _COMMANDS:
        choices = ", ".join(_COMMANDS)
        problem = f"{action!a} is not a command of config" if action else "config needs a command"
        raise ConfigError(f"{problem}{did_you_mean(action, list(_COMMANDS))}; give one of {choices}")
    return _COMMANDS[action](words[1:])


def _show(words: Sequence[str]) -> str:
    as_json, flags = parse_with_options("accel-nb config show", "Show every option, its value and its origin.", words)
    resolved = resolve([environment_layer(option_variables()), parse_flags(flags, source="command line")])
    if not as_json:
        return resolved.table() + "\n"
    rows = {row.option: {"value": row.value, "origin": str(row.origin)} for row in resolved.explain()}
    return json.dumps({"options": rows, "notes": list(resolved.notes)}, indent=2, default=str) + "\n"


def _init(words: Sequence[str]) -> str:
    from accel_nb.config.starter_file import starter_file
    from accel_nb.runtime.process.hardware import inspect_machine

    parser = CommandParser(prog="accel-nb config init", description="Create a file of options for this machine.")
    parser.add_argument("--out", metavar="FILE", help="the file to create; by default the text is printed")
    options = parser.parse_args(words)
    machine = inspect_machine()
    text = starter_file(len(machine.gpus), machine.num_cores)
    return text if options.out is None else _write_options(options.out, text)


def _import(words: Sequence[str]) -> str:
    from accel_nb.config.accelerate_import import import_file
    from accel_nb.config.files import to_yaml

    parser = CommandParser(
        prog="accel-nb config import",
        description="Convert a file that `accelerate config` wrote, or a DeepSpeed configuration, to options.",
    )
    parser.add_argument(
        "file", metavar="FILE", help="the file, often ~/.cache/huggingface/accelerate/default_config.yaml"
    )
    parser.add_argument("--out", metavar="FILE", help="the file of options to create; by default they are printed")
    parser.add_json_flag()
    options = parser.parse_args(words)
    _, report = import_file(options.file)
    text = to_yaml(report.options)
    end = f"\n{text}" if options.out is None else _write_options(options.out, text)
    return json.dumps(asdict(report), indent=2, default=str) + "\n" if options.json else f"{report.table()}\n{end}"


def _deepspeed(words: Sequence[str]) -> str:
    from accel_nb.config.deepspeed_report import show_deepspeed
    from accel_nb.pool.device_assignment import uses_gpus

    parser = CommandParser(
        prog="accel-nb config deepspeed",
        description="Print the configuration that accel_nb passes to DeepSpeed, and the origin of each value. "
        "The flags of a run are accepted too; nothing is started.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", metavar="FILE", help="the JSON file to create; by default the configuration is printed"
    )
    options, flags = parser.parse_known_args(words)
    resolved = resolve([environment_layer(option_variables()), parse_flags(flags, source="command line")])
    report = show_deepspeed(resolved, on_gpus=uses_gpus(resolved.config.gpus, resolved.config.cpus))
    end = f"\n{report.json}" if options.out is None else _write_new_file(options.out, report.json)
    return f"{report.table}{end}"


def _write_options(path: str, text: str) -> str:
    return f"{_write_new_file(path, text).rstrip()}; use it with --config {path}\n"


def _write_new_file(path: str, text: str) -> str:
    try:
        with open(Path(path).expanduser(), "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path}: already exists and was not changed; give another --out, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    return f"wrote {path}\n"


def _without_arguments(name: str, description: str, text: Callable[[], str]) -> Callable[[Sequence[str]], str]:
    """Return a command that prints a text and takes no arguments."""

    def command(words: Sequence[str]) -> str:
        CommandParser(prog=f"accel-nb config {name}", description=description).parse_args(words)
        return text()

    return command


_COMMANDS: dict[str, Callable[[Sequence[str]], str]] = {
    "show": _show,
    "init": _init,
    "import": _import,
    "deepspeed": _deepspeed,
    "schema": _without_arguments("schema", "Print the JSON Schema of the options.", schema_json),
    "docs": _without_arguments("docs", "Print the option reference as Markdown.", options_markdown),
    "flags": _without_arguments("flags", "List every flag in one table.", lambda: usage("accel-nb config show") + "\n"),
}
