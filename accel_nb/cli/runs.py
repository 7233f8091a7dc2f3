"""``accel-nb runs list|show|compare|label|open``: the runs that were recorded on this machine."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from accel_nb.cli.parser import CommandParser
from accel_nb.errors import ConfigError
from accel_nb.runs import Run, RunRegistry
from accel_nb.runs.comparison import comparable_facts, differing_facts, plain_text
from accel_nb.runtime.strict_json import name_non_finite

_MAX_SHOWN = 4


def run(arguments: Sequence[str]) -> str:
    """Run one of the commands and return its output. Raise ConfigError for wrong arguments and unknown runs."""
    options = _parse_arguments(arguments)
    data, lines = options.function(RunRegistry(), options)
    if options.json:
        return json.dumps(name_non_finite(data), indent=2, allow_nan=False) + "\n"
    return "\n".join(lines) + "\n"


def _parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(prog="accel-nb runs", description="Show the runs that were recorded on this machine.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)
    listing = _command(commands, _list, "the runs, newest first")
    listing.add_argument("--limit", metavar="N", type=int, default=20, help="maximum number of runs (default: 20)")
    listing.add_argument("--sort", metavar="COLUMN", default="started", help=_SORT)
    listing.add_argument(
        "--reverse", action="store_true", help="the other way round: the earliest, or the largest, first"
    )
    listing.add_argument("--tag", metavar="TAG", help="only runs with this tag")
    listing.add_argument("--starred", action="store_true", help="only runs with a star")
    listing.add_argument("--notebook", metavar="TEXT", help="only runs of notebooks whose path contains this")
    _command(commands, _show, "details of one run").add_argument("run", metavar="RUN", help=_RUN)
    _command(commands, _compare, "differences between runs").add_argument("runs", metavar="RUN", nargs="+", help=_RUN)
    label = _command(commands, _label, "change a run's name, notes, tags and star")
    label.add_argument("run", metavar="RUN", help=_RUN)
    label.add_argument("--name", metavar="NAME", help='another name; "" restores the recorded one')
    label.add_argument("--notes", metavar="TEXT", help="notes, in place of the present ones")
    label.add_argument("--tag", metavar="TAG", action="append", default=[], help="add a tag; may be repeated")
    label.add_argument("--untag", metavar="TAG", action="append", default=[], help="remove a tag; may be repeated")
    star = label.add_mutually_exclusive_group()
    star.add_argument("--star", dest="star", action="store_true", default=None, help="add the star")
    star.add_argument("--unstar", dest="star", action="store_false", help="remove the star")
    _command(commands, _open, "the folder of a run").add_argument("run", metavar="RUN", help=_RUN)
    return parser.parse_args(arguments)


_RUN = "an id, a unique part of an id, a name, or last"
_SORT = "started, name, took, steps, or a metric, smallest first (default: started, newest first)"


def _command(commands: Any, function: Any, text: str) -> CommandParser:
    parser: CommandParser = commands.add_parser(function.__name__.removeprefix("_"), help=text, description=text)
    parser.add_json_flag()
    parser.set_defaults(function=function)
    return parser


def _list(registry: RunRegistry, options: argparse.Namespace) -> tuple[Any, list[str]]:
    if options.limit < 1:
        raise ConfigError(f"accel-nb runs list: --limit {options.limit} must be at least 1")
    is_filtered = options.starred or options.tag is not None or options.notebook is not None
    by_time = options.sort == "started"
    every = registry.runs(options.limit if by_time and not options.reverse and not is_filtered else None)
    wanted = [run for run in every if _is_wanted(run, options)]
    if not by_time:
        wanted = _sorted(wanted, options.sort, options.reverse)
    elif options.reverse:
        wanted.reverse()
    found = wanted[: options.limit]
    rows = [("run", "name", "outcome", "started", "took", "metrics", "tags")]
    rows += [
        (
            run.id,
            f"* {run.title}" if run.labels.is_starred else run.title,
            run.outcome,
            _format_time(run.started),
            _duration_text(run),
            _metrics(run.metrics, _MAX_SHOWN),
            ", ".join(run.labels.tags),
        )
        for run in found
    ]
    nothing = f"no run is recorded in {registry.folder}" if not every else f"no run of {len(every)} matches the filters"
    return [asdict(run) for run in found], _table(rows) if found else [nothing]


def _is_wanted(run: Run, options: argparse.Namespace) -> bool:
    return (
        (run.labels.is_starred or not options.starred)
        and (options.tag is None or options.tag in run.labels.tags)
        and (options.notebook is None or options.notebook in (run.notebook or ""))
    )


def _sorted(runs: Sequence[Run], column: str, is_reversed: bool) -> list[Run]:
    """Return runs sorted by a column other than ``started``; runs without a value are last.

    Raise ConfigError if no run has the column.
    """
    if column == "name":
        return sorted(runs, key=lambda run: run.title, reverse=is_reversed)
    values: dict[str, float | None] = {}
    for run in runs:
        known = {"took": run.duration_s, "steps": run.num_steps}
        value = known[column] if column in known else run.metrics.get(column)
        values[run.id] = None if value is None or math.isnan(value) else value
    if runs and column not in ("took", "steps") and all(value is None for value in values.values()):
        names = sorted({name for run in runs for name in run.metrics})
        raise ConfigError(
            f"accel-nb runs list: no run has a metric {column!a}; --sort takes started, name, took, steps"
            + "".join(f", {name}" for name in names[:20])
        )
    with_value = [run for run in runs if values[run.id] is not None]
    with_value.sort(key=lambda run: values[run.id] or 0.0, reverse=is_reversed)
    return with_value + [run for run in runs if values[run.id] is None]


def _show(registry: RunRegistry, options: argparse.Namespace) -> tuple[Any, list[str]]:
    run = registry.find(options.run)
    facts: list[tuple[str, object]] = [
        ("run", run.id),
        ("name", run.title),
        ("star", "yes" if run.labels.is_starred else None),
        ("tags", ", ".join(run.labels.tags)),
        ("notebook", run.notebook),
        ("target", " ".join([run.target, *run.args])),
        ("outcome", run.outcome if run.exit_code is None else f"{run.outcome}, exit code {run.exit_code}"),
        ("started", _format_time(run.started)),
        ("took", _duration_text(run)),
        ("steps", run.num_steps),
        ("metrics", _metrics(run.metrics, None)),
        ("checkpoints", ", ".join(run.checkpoints[-_MAX_SHOWN:])),
        ("code", run.code),
        *((name, plain_text(value)) for name, value in run.environment.items()),
    ]
    lines = _table([(name, str(value)) for name, value in facts if value not in (None, "")])
    lines += [f"{name} = {value} from {origin}" for name, (value, origin) in run.config.items()]
    lines += [_printable(line) for text in (run.labels.notes, run.error or "") for line in text.splitlines()]
    return asdict(run), lines


def _compare(registry: RunRegistry, options: argparse.Namespace) -> tuple[Any, list[str]]:
    runs = [registry.find(wanted) for wanted in options.runs]
    if len({run.id for run in runs}) < 2:
        raise ConfigError("accel-nb runs compare takes two or more different runs")
    differing = differing_facts([comparable_facts(run) for run in runs])
    rows = [("", *(run.id for run in runs))]
    rows += [(name, *("-" if value is None else value for value in values)) for name, values in differing.items()]
    lines = _table(rows) if differing else [f"the {len(runs)} runs do not differ"]
    return {"runs": [run.id for run in runs], "differ": differing}, lines


def _label(registry: RunRegistry, options: argparse.Namespace) -> tuple[Any, list[str]]:
    run = registry.find(options.run)
    values: dict[str, Any] = {name: getattr(options, name) for name in ("name", "notes")}
    values["is_starred"] = options.star
    if options.tag or options.untag:
        values["tags"] = [tag for tag in (*run.labels.tags, *options.tag) if tag not in options.untag]
    changes = {name: value for name, value in values.items() if value is not None}
    if not changes:
        raise ConfigError("accel-nb runs label: name what to change: --name, --notes, --tag, --untag, --star, --unstar")
    run = registry.set_labels(run, changes)
    star = "* " if run.labels.is_starred else ""
    tags = "".join(f" [{tag}]" for tag in run.labels.tags)
    return asdict(run.labels), [_printable(f"{run.id}  {star}{run.title}{tags}")]


def _open(registry: RunRegistry, options: argparse.Namespace) -> tuple[Any, list[str]]:
    folder = registry.folder / registry.find(options.run).id
    return {"folder": str(folder), "files": sorted(path.name for path in folder.iterdir())}, [str(folder)]


def _metrics(metrics: Any, limit: int | None) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in list(metrics.items())[:limit])


def _number(value: float) -> str:
    return f"{value:.6g}"


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _duration_text(run: Run) -> str:
    return "" if run.duration_s is None else f"{run.duration_s:.1f} s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of aligned columns, with control characters escaped."""
    texts = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
