"""``accel-nb doctor``: a report about this machine, with problems and their remedies."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from accel_nb.cli.parser import CommandParser
from accel_nb.notebook.reports.doctor import diagnose


def run(words: Sequence[str]) -> str:
    """Return the report. Raise `ConfigError` for wrong arguments."""
    parser = CommandParser(
        prog="accel-nb doctor", description="Report this machine's devices, and problems with remedies."
    )
    parser.add_json_flag()
    as_json = parser.parse_args(words).json
    findings = diagnose()
    if as_json:
        return json.dumps([asdict(finding) for finding in findings], indent=2) + "\n"
    return "".join(f"{finding}\n" for finding in findings)
