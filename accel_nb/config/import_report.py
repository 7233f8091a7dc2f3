"""What becomes of the values of a foreign file: an account of each, whichever file it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel_nb.config.layers import Layer, quoted, resolve
from accel_nb.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Left:
    """Why a value cannot come along."""

    reason: str


Outcome = dict[str, Any] | str | Left
"""Options, the reason why none are needed, or why there are none."""


@dataclass(slots=True)
class Imported:
    """What became of a foreign file: options, and one line for each of its values.

    ``taken`` maps a foreign name to the options it became; ``needless`` and ``left`` map it to the reason.
    """

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    taken: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    needless: dict[str, str] = field(default_factory=dict[str, str])
    left: dict[str, str] = field(default_factory=dict[str, str])

    def table(self) -> str:
        """Return a line for each value of the file, those that were left behind last."""
        rows = [
            (name, "->", ", ".join(f"{option}: {_text(value)}" for option, value in options.items()))
            for name, options in self.taken.items()
        ]
        rows += [(name, "ok", reason) for name, reason in self.needless.items()]
        rows += [(name, "LEFT", reason) for name, reason in self.left.items()]
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {sign:<4}  {text}" for name, sign, text in rows)


def account(found: Imported, name: str, outcome: Outcome, source: str) -> None:
    """Note what becomes of one value; options that the schema refuses are left behind with its reason."""
    if isinstance(outcome, str):
        found.needless[name] = outcome
    elif isinstance(outcome, Left):
        found.left[name] = outcome.reason
    else:
        _take(found, name, outcome, source)


def _take(found: Imported, name: str, options: dict[str, Any], source: str) -> None:
    try:
        resolve([Layer("file", options, f"{name} in {source}")])
    except ConfigError as error:
        found.left[name] = error.problems[0]
        return
    found.taken[name] = options
    found.options.update(options)


def _text(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, quoted(value)) if isinstance(value, bool) else quoted(value)
