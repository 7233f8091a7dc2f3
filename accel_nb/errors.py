"""Every error that accel_nb raises on purpose.

Each message names what was given, where it came from, what is allowed and what to do.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from typing import Any

from accel_nb.secrets import hide_secrets

_OWN = os.path.dirname(__file__) + os.sep
_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_MAX_PLACES = 8


class AccelNbError(Exception):
    """Root of the errors below: catch it to catch them all. Their texts show no secrets."""

    def __str__(self) -> str:
        return hide_secrets(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows of the error: where it was caused in the user's code, and the message.

        The message says what is wrong and what to do, so frames of this package and of libraries are left out.
        """
        frames = traceback.walk_tb(self.__traceback__)
        places = [(frame.f_code.co_filename, line) for frame, line in frames if _is_users(frame.f_code.co_filename)]
        is_obvious = len(places) == 1 and _num_lines(places[0][0]) <= 1
        shown = [] if is_obvious else [_describe_place(*place) for place in places[-_MAX_PLACES:]]
        return [*shown, f"{type(self).__name__}: {self}"]


def _is_users(file: str) -> bool:
    """Whether a file holds code of the user's: none of this package, of Python or of an installed library."""
    is_library = file.startswith((_STDLIB, "<frozen ")) or any(part in file for part in _PACKAGES)
    return not (is_library or file.startswith(_OWN))


def _num_lines(file: str) -> int:
    """Return how many lines of code a file or cell has, comments left out."""
    lines = map(str.strip, linecache.getlines(file))
    return sum(bool(line) and not line.startswith("#") for line in lines)


def _describe_place(file: str, line: int) -> str:
    """Return a line of code with its place, which a cell has the notebook's name for."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    format_name = getattr(getattr(get_shell(), "compile", None), "format_code_name", None)  # since IPython 8
    named = None if format_name is None else format_name(file)
    where = file if named is None else " ".join(named)
    return f"{where}, line {line}: {linecache.getline(file, line).strip()}"


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


class UnknownNameError(AccelNbError, NameError):
    """A name that was asked for is not there."""


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
