"""Differences between runs: options, results, code and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_nb.runs.record import Run


def comparable_facts(run: Run) -> dict[str, str]:
    """Return the facts of a run to compare with others, as text by name."""
    took = "" if run.duration_s is None else f"{run.duration_s:.1f} s"
    facts = {"name": run.title, "target": " ".join([run.target, *run.args]), "outcome": run.outcome, "took": took}
    if run.notebook is not None:
        facts["notebook"] = run.notebook
    facts |= {name: f"{value:.6g}" for name, value in run.metrics.items()}
    facts |= {name: str(value) for name, (value, _) in run.config.items()}
    if run.code is not None:
        facts["code"] = run.code
    return facts | {name: plain_text(value) for name, value in run.environment.items()}


def differing_facts(runs: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Return the facts in which runs differ: for each name the runs' values, None where a run has no such fact."""
    names = dict.fromkeys(name for facts in runs for name in facts)
    rows = {name: [facts.get(name) for facts in runs] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def plain_text(value: Any) -> str:
    """Return a fact as text; a table as names with their values."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return str(value)
