"""The argument parser of all commands: wrong arguments are one line and exit status 2, ``--json`` prints JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from accel_nb.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """A parser that raises ConfigError for wrong arguments instead of ending the process."""

    def error(self, message: str) -> Any:
        """Raise ConfigError with the message."""
        raise ConfigError(f"{self.prog}: {message}")

    def add_json_flag(self) -> None:
        """Add the flag ``--json``, which makes a command print one JSON document."""
        self.add_argument("--json", action="store_true", help="machine-readable output")


def parse_with_options(prog: str, description: str, words: Sequence[str]) -> tuple[bool, list[str]]:
    """Parse the arguments of a command that accepts a run's options; return whether to print JSON, and the others."""
    epilog = "Flags are those of %%accelerate: accel-nb config flags lists them."
    usage = f"{prog} [--json] [flags]"
    parser = CommandParser(prog=prog, description=description, usage=usage, epilog=epilog, allow_abbrev=False)
    parser.add_json_flag()
    options, others = parser.parse_known_args(words)
    return options.json, others
