"""The argument parser of all commands: wrong use is one line and exit status 2, ``--json`` prints JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from accel_nb.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """A parser that raises ConfigError for wrong use instead of ending the process."""

    def error(self, message: str) -> Any:
        """Raise ConfigError with the message."""
        raise ConfigError(f"{self.prog}: {message}")

    def add_json_flag(self) -> None:
        """Add ``--json``, with which a command prints one JSON document."""
        self.add_argument("--json", action="store_true", help="machine-readable output")


def parse_with_options(prog: str, description: str, words: Sequence[str]) -> tuple[bool, list[str]]:
    """Parse the words of a command that takes a run's options; return whether to print JSON, and the other words."""
    epilog = "Flags are those of %%accelerate: accel-nb config flags lists them."
    usage = f"{prog} [--json] [flags]"
    parser = CommandParser(prog=prog, description=description, usage=usage, epilog=epilog, allow_abbrev=False)
    parser.add_json_flag()
    found, others = parser.parse_known_args(words)
    return found.json, others
