"""Every error that accel_nb raises on purpose.

Each message names what was given, where it came from, what is allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_nb.secrets import hide_secrets


class AccelNbError(Exception):
    """Root of the errors below: catch it to catch them all. Their texts show no secrets."""

    def __str__(self) -> str:
        return hide_secrets(super().__str__())


class ConfigError(AccelNbError, ValueError):
    """One or more options are wrong; ``problems`` holds one line for each."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CellSyntaxError(AccelNbError, ValueError):
    """The cell's text, or that of a module which it imports, is not Python."""


class MisuseError(AccelNbError, RuntimeError):
    """The training API was used in an order or with objects that cannot work."""


class UnsyncedGradientError(MisuseError):
    """An optimizer is about to step parameters whose gradients never left this rank."""


class NanLossError(MisuseError, ArithmeticError):
    """The loss of a step is NaN; ``rank`` and ``step`` (from 1) say which. Raised before the step where it is known."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step
        super().__init__(
            f"the loss of step {step} is NaN on rank {rank}: look for a division by zero, a logarithm of zero, a "
            "learning rate that is too high, or NaN in the data; the option sentinels, set to off, trains on regardless"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.step)


class ShippingError(AccelNbError, TypeError):
    """A name that the cell uses cannot be sent to the workers."""


class PoolError(AccelNbError, RuntimeError):
    """The worker pool could not do what was asked of it."""


class IllegalTransition(PoolError):
    """A pool was asked to move between two states that are not connected."""


class WorkerDied(PoolError):
    """A worker process ended while it was needed; ``rank`` says which."""

    def __init__(self, message: str, *, rank: int) -> None:
        self.rank = rank
        super().__init__(message)


class CheckpointError(AccelNbError, RuntimeError):
    """A checkpoint cannot be written or read; the old ones and the training are untouched."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint is incomplete, damaged or hostile; the message names the file. Nothing was loaded from it."""


class NoCheckpoint(CheckpointError):
    """There is no complete checkpoint where one was looked for."""
