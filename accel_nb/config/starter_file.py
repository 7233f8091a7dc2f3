"""A file of options to start with: settings for this machine, and every other option as a comment."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from typing import Any

from accel_nb.config.files import to_yaml
from accel_nb.config.schema import OPTIONS, SECTIONS, Config, Option

_WIDTH = 100


def starter_file(num_gpus: int, num_cores: int) -> str:
    """Return the text of a file that `read_file` can read, with workers and precision for the machine."""
    suggested = _suggest_options(num_gpus, num_cores)
    lines = [*to_yaml(suggested).splitlines(), "", "# All other options with their defaults. Remove the # to set one."]
    lines += _comment_out((option for option in OPTIONS.values() if option.section is None), suggested)
    for section in SECTIONS:
        options = [option for option in OPTIONS.values() if option.section == section]
        if options:
            lines += ["", f"# {Config.model_fields[section].description}", f"#{section}:"]
            lines += _comment_out(options, suggested)
    return "\n".join(lines) + "\n"


def _suggest_options(num_gpus: int, num_cores: int) -> dict[str, Any]:
    if num_gpus:
        return {"gpus": num_gpus, "precision": "auto"}
    return {"cpus": max(1, min(2, num_cores))}


def _comment_out(options: Iterable[Option], suggested: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for option in options:
        if option.name in suggested or option.name == "config":
            continue
        help_text = f"{option.field.description} Allowed: {option.allowed}."
        lines += ["", *textwrap.wrap(help_text, _WIDTH, initial_indent="# ", subsequent_indent="# ")]
        indent = "  " if option.section else ""
        lines.append(f"#{indent}{option.name.rpartition('.')[2]}: {json.dumps(option.default)}")
    return lines
