"""Report on the import of another program's configuration: what each of its values became."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel_nb.config.layers import Layer, resolve
from accel_nb.config.message_text import quoted
from accel_nb.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NotImported:
    """The reason why a value has no option."""

    reason: str


ImportOutcome = dict[str, Any] | str | NotImported
"""The result for one value: options, the reason why none are needed, or why there are none."""


@dataclass(slots=True)
class ImportReport:
    """The result of an import: options, and one line for each value of the file.

    ``taken`` maps a name of the file to its options; ``needless`` and ``left`` map it to the reason.
    """

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    taken: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    needless: dict[str, str] = field(default_factory=dict[str, str])
    left: dict[str, str] = field(default_factory=dict[str, str])

    def table(self) -> str:
        """Return a line for each value of the file, those without an option last."""
        rows = [
            (name, "->", ", ".join(f"{option}: {_text(value)}" for option, value in options.items()))
            for name, options in self.taken.items()
        ]
        rows += [(name, "ok", reason) for name, reason in self.needless.items()]
        rows += [(name, "LEFT", reason) for name, reason in self.left.items()]
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {sign:<4}  {text}" for name, sign, text in rows)


def record_outcome(found: ImportReport, name: str, outcome: ImportOutcome, source: str) -> None:
    """Record the result for one value; options that the schema refuses are reported with its reason."""
    if isinstance(outcome, str):
        found.needless[name] = outcome
    elif isinstance(outcome, NotImported):
        found.left[name] = outcome.reason
    else:
        _take(found, name, outcome, source)


def _take(found: ImportReport, name: str, options: dict[str, Any], source: str) -> None:
    try:
        resolve([Layer("file", options, f"{name} in {source}")])
    except ConfigError as error:
        found.left[name] = error.problems[0]
        return
    found.taken[name] = options
    found.options.update(options)


def _text(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, quoted(value)) if isinstance(value, bool) else quoted(value)
