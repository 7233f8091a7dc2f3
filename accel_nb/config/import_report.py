"""Report on the import of another program's configuration: the result for each of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_nb.config.layers import Layer, resolve
from accel_nb.config.message_text import quoted
from accel_nb.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NotImported:
    """The reason why a value is not imported."""

    reason: str


ImportOutcome = dict[str, Any] | str | NotImported
"""The result for one value: options, the reason why none is needed, or the reason why it is not imported."""

Rule = Callable[[Any, Mapping[str, Any]], ImportOutcome]
"""A function that returns the result for a value, given the value and all values of the file by name."""


def imported_as(option: str, change: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Return the rule of a value that is imported as ``option``."""
    return lambda value, _values: {option: change(value)}


def not_needed(reason: str) -> Rule:
    """Return the rule of a value that needs no option."""
    return lambda _value, _values: reason


@dataclass(slots=True)
class ImportReport:
    """The result of an import: options, and one line for each value of the file.

    By name in the file: ``imported`` has the options of imported values, ``not_needed`` the reasons why values need no
    option, and ``not_imported`` the reasons why values are not imported.
    """

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    imported: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    not_needed: dict[str, str] = field(default_factory=dict[str, str])
    not_imported: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, other: ImportReport, prefix: str) -> None:
        """Add the import of another file, whose values get names with a prefix."""
        self.options.update(other.options)
        self.imported.update({prefix + name: value for name, value in other.imported.items()})
        self.not_needed.update({prefix + name: value for name, value in other.not_needed.items()})
        self.not_imported.update({prefix + name: value for name, value in other.not_imported.items()})

    def table(self) -> str:
        """Return a line for each value of the file, the values that are not imported last."""
        rows = [
            (name, "->", ", ".join(f"{option}: {_text(value)}" for option, value in options.items()))
            for name, options in self.imported.items()
        ]
        rows += [(name, "ok", reason) for name, reason in self.not_needed.items()]
        rows += [(name, "LEFT", reason) for name, reason in self.not_imported.items()]
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {sign:<4}  {text}" for name, sign, text in rows)


def record_outcome(report: ImportReport, name: str, outcome: ImportOutcome, source: str) -> None:
    """Record the result for one value; options that `resolve` rejects are recorded as not imported."""
    if isinstance(outcome, str):
        report.not_needed[name] = outcome
    elif isinstance(outcome, NotImported):
        report.not_imported[name] = outcome.reason
    else:
        _add_options(report, name, outcome, source)


def _add_options(report: ImportReport, name: str, options: dict[str, Any], source: str) -> None:
    try:
        resolve([Layer("file", options, f"{name} in {source}")])
    except ConfigError as error:
        report.not_imported[name] = error.problems[0]
        return
    report.imported[name] = options
    report.options.update(options)


def _text(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, quoted(value)) if isinstance(value, bool) else quoted(value)
