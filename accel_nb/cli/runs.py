"""``accel-nb runs list|show|compare|open``: the runs that were recorded on this machine."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from accel_nb.cli.parser import CommandParser
from accel_nb.errors import ConfigError
from accel_nb.runs import Run, RunRegistry

_MAX_SHOWN = 4


def run(words: Sequence[str]) -> str:
    """Run one of the commands and return its output. Raise ConfigError for wrong arguments and unknown runs."""
    options = _parse_arguments(words)
    facts, lines = options.act(RunRegistry(), options)
    return json.dumps(facts, indent=2) + "\n" if options.json else "\n".join(lines) + "\n"


def _parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(prog="accel-nb runs", description="Show the runs that were recorded on this machine.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)
    listing = _command(commands, _list, "all runs, newest first")
    listing.add_argument("--limit", metavar="N", type=int, default=20, help="maximum number of runs (default: 20)")
    _command(commands, _show, "details of one run").add_argument("run", metavar="RUN", help=_RUN)
    _command(commands, _compare, "differences between runs").add_argument("runs", metavar="RUN", nargs="+", help=_RUN)
    _command(commands, _open, "the folder of a run").add_argument("run", metavar="RUN", help=_RUN)
    return parser.parse_args(words)


_RUN = "an id, a unique part of an id, a name, or last"


def _command(commands: Any, act: Any, text: str) -> CommandParser:
    parser: CommandParser = commands.add_parser(act.__name__.removeprefix("_"), help=text, description=text)
    parser.add_json_flag()
    parser.set_defaults(act=act)
    return parser


def _list(registry: RunRegistry, options: argparse.Namespace) -> tuple[Any, list[str]]:
    if options.limit < 1:
        raise ConfigError(f"accel-nb runs list: --limit {options.limit} must be at least 1")
    runs = registry.runs(options.limit)
    rows = [("run", "name", "outcome", "started", "took", "metrics")]
    rows += [
        (run.id, run.name, run.outcome, _clock(run.started), _took(run), _metrics(run.metrics, _MAX_SHOWN))
        for run in runs
    ]
    lines = _table(rows) if runs else [f"no run is recorded in {registry.folder}"]
    return [asdict(run) for run in runs], lines


def _show(registry: RunRegistry, options: argparse.Namespace) -> tuple[Any, list[str]]:
    run = registry.find(options.run)
    facts: list[tuple[str, object]] = [
        ("run", run.id),
        ("name", run.name),
        ("target", " ".join([run.target, *run.args])),
        ("outcome", run.outcome if run.exit_code is None else f"{run.outcome}, exit code {run.exit_code}"),
        ("started", _clock(run.started)),
        ("took", _took(run)),
        ("steps", run.num_steps),
        ("metrics", _metrics(run.metrics, None)),
        ("checkpoints", ", ".join(run.checkpoints[-_MAX_SHOWN:])),
        ("code", run.code),
        *((name, _plain(value)) for name, value in run.environment.items()),
    ]
    lines = _table([(name, str(value)) for name, value in facts if value not in (None, "")])
    lines += [f"{name} = {value} from {origin}" for name, (value, origin) in run.config.items()]
    lines += [_printable(line) for line in (run.error or "").splitlines()]
    return asdict(run), lines


def _compare(registry: RunRegistry, options: argparse.Namespace) -> tuple[Any, list[str]]:
    runs = [registry.find(wanted) for wanted in options.runs]
    if len({run.id for run in runs}) < 2:
        raise ConfigError("accel-nb runs compare takes two or more different runs")
    columns = [_comparable(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    differing = [name for name in names if len({column.get(name, "-") for column in columns}) > 1]
    rows = [("", *(run.id for run in runs))]
    rows += [(name, *(column.get(name, "-") for column in columns)) for name in differing]
    facts = {name: [column.get(name) for column in columns] for name in differing}
    lines = _table(rows) if differing else [f"the {len(runs)} runs do not differ"]
    return {"runs": [run.id for run in runs], "differ": facts}, lines


def _open(registry: RunRegistry, options: argparse.Namespace) -> tuple[Any, list[str]]:
    folder = registry.folder / registry.find(options.run).id
    return {"folder": str(folder), "files": sorted(path.name for path in folder.iterdir())}, [str(folder)]


def _comparable(run: Run) -> dict[str, str]:
    """Return the facts to compare between runs, as text by name."""
    facts = {"name": run.name, "target": " ".join([run.target, *run.args]), "outcome": run.outcome, "took": _took(run)}
    facts |= {name: _number(value) for name, value in run.metrics.items()}
    facts |= {name: str(value) for name, (value, _) in run.config.items()}
    if run.git is not None:
        facts["code"] = run.code or ""
    return facts | {name: _plain(value) for name, value in run.environment.items()}


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return str(value)


def _metrics(metrics: Any, limit: int | None) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in list(metrics.items())[:limit])


def _number(value: float) -> str:
    return f"{value:.6g}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _took(run: Run) -> str:
    return "" if run.duration_s is None else f"{run.duration_s:.1f} s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of aligned columns, with control characters escaped."""
    texts = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
