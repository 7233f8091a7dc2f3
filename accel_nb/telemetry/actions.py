"""Control actions that a user may request of a running training; imports no torch.

Requests come from a browser or a typed line. `read_action` accepts any value, checks it, and returns one of these
records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from keyword import iskeyword
from typing import Any, ClassVar

MAX_LEARNING_RATE = 1000.0
MAX_FACTOR = 1e6
MAX_INTERVAL = 1_000_000
MAX_NAMES = 16
IS_BEING_SAVED = "is being saved"
"""The last words of an action's result while its checkpoint is not complete."""


@dataclass(frozen=True, slots=True)
class StopAfterStep:
    """End the cell after the step as if it had finished; save a checkpoint first if the run has a folder for them."""

    kind: ClassVar[str] = "stop"


@dataclass(frozen=True, slots=True)
class SaveNow:
    """Save a checkpoint after the step."""

    kind: ClassVar[str] = "checkpoint"


@dataclass(frozen=True, slots=True)
class ScaleLearningRate:
    """Multiply the current and the scheduled learning rates by ``factor``."""

    kind: ClassVar[str] = "scale_rate"
    factor: float

    def __post_init__(self) -> None:
        if not 1 / MAX_FACTOR <= _number(self.factor) <= MAX_FACTOR:
            raise ValueError(f"the factor of a learning rate must be from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}")


@dataclass(frozen=True, slots=True)
class SetLearningRate:
    """Set the learning rate to ``value``; as in `ScaleLearningRate`, groups and schedules keep their proportions."""

    kind: ClassVar[str] = "set_rate"
    value: float

    def __post_init__(self) -> None:
        if not 0 < _number(self.value) <= MAX_LEARNING_RATE:
            raise ValueError(f"a learning rate must be above 0 and at most {MAX_LEARNING_RATE:g}")


@dataclass(frozen=True, slots=True)
class SetReportInterval:
    """Report every ``steps`` steps until the cell ends: the mean over them, and the values logged in the last one."""

    kind: ClassVar[str] = "interval"
    steps: int

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or not 1 <= self.steps <= MAX_INTERVAL:
            raise ValueError(f"a logging interval must be a whole number of steps from 1 to {MAX_INTERVAL:,}")


@dataclass(frozen=True, slots=True)
class TakeMemorySnapshot:
    """Report after the step the allocator's blocks on every rank's device, and the variables that use them."""

    kind: ClassVar[str] = "memory_snapshot"


@dataclass(frozen=True, slots=True)
class Inspect:
    """Report the values of variables on rank 0 after the step."""

    kind: ClassVar[str] = "inspect"
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if (
            not isinstance(self.names, tuple)
            or not 1 <= len(self.names) <= MAX_NAMES
            or not all(isinstance(name, str) and name.isidentifier() and not iskeyword(name) for name in self.names)
        ):
            raise ValueError(f"inspect takes 1 to {MAX_NAMES} names of variables")


Action = (
    StopAfterStep | SaveNow | ScaleLearningRate | SetLearningRate | SetReportInterval | TakeMemorySnapshot | Inspect
)

_KINDS: dict[str, type[Action]] = {
    action.kind: action
    for action in (
        StopAfterStep,
        SaveNow,
        ScaleLearningRate,
        SetLearningRate,
        SetReportInterval,
        TakeMemorySnapshot,
        Inspect,
    )
}


def to_message(action: Action) -> dict[str, Any]:
    """Return the action as a JSON-ready dict with its kind."""
    return {"kind": action.kind, **asdict(action)}


def read_action(message: object) -> Action:
    """Return the action in a message; raises ValueError, with a text for the user, for any other value."""
    kind = message.get("kind") if isinstance(message, Mapping) else None
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None or not isinstance(message, Mapping):
        raise ValueError(f"unknown action; the actions are {', '.join(_KINDS)}")
    values: dict[str, Any] = {name: value for name, value in message.items() if name != "kind"}
    if set(values) != {field.name for field in fields(cls)}:
        raise ValueError(f"{cls.kind} takes {', '.join(field.name for field in fields(cls)) or 'nothing'}")
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType]
        for name, value in values.items()
    }
    return cls(**given)


def _number(value: object) -> float:
    """Return a number unchanged; for any other value NaN, which fails every check of a range."""
    return math.nan if isinstance(value, bool) or not isinstance(value, int | float) else value
