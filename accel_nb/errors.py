"""The exceptions of accel_nb.

Each message contains the value, its origin, what is allowed and what to do.
"""

from __future__ import annotations

import builtins
import linecache
import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

from accel_nb.installed_files import is_of_library
from accel_nb.secrets import hide_secrets

_PACKAGE_FOLDER = os.path.dirname(__file__) + os.sep
_MAX_PLACES = 8
GROUPS: tuple[type[BaseException], ...] = tuple(filter(None, [getattr(builtins, "BaseExceptionGroup", None)]))
"""The base class of groups of errors, if this Python has it."""


class AccelNbError(Exception):
    """Base class of the exceptions of accel_nb. Secrets in their messages are hidden."""

    def __str__(self) -> str:
        return hide_secrets(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that IPython shows: the frames of the user's code, and the message.

        Frames of this package and of libraries are left out, since the message says what is wrong and what to do.
        """
        frames = traceback.walk_tb(self.__traceback__)
        places = [(frame.f_code.co_filename, line) for frame, line in frames if _is_users(frame.f_code.co_filename)]
        is_obvious = len(places) == 1 and _num_lines(places[0][0]) <= 1
        shown = [] if is_obvious else [_describe_place(*place) for place in places[-_MAX_PLACES:]]
        return [*shown, f"{type(self).__name__}: {self}"]


def _is_users(file: str) -> bool:
    """Return whether a file is the user's: not of this package, of Python or of an installed library."""
    return not (is_of_library(file) or file.startswith(_PACKAGE_FOLDER))


def _num_lines(file: str) -> int:
    """Return the number of lines of code of a file or cell, without comments."""
    lines = map(str.strip, linecache.getlines(file))
    return sum(bool(line) and not line.startswith("#") for line in lines)


def _describe_place(file: str, line: int) -> str:
    """Return a line of code with its file and line number; for a cell, with IPython's name of the cell."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    format_name = getattr(getattr(get_shell(), "compile", None), "format_code_name", None)  # since IPython 8
    named = None if format_name is None else format_name(file)
    where = file if named is None else " ".join(named)
    return f"{where}, line {line}: {linecache.getline(file, line).strip()}"


def error_text(error: BaseException) -> str:
    """Return the text of an error, or a placeholder if its ``__str__`` raises."""
    return str(traceback.TracebackException(type(error), error, None))


class ConfigError(AccelNbError, ValueError):
    """One or more options are wrong; ``problems`` has one line for each."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CellSyntaxError(AccelNbError, ValueError):
    """The cell, or a module that it imports, is not valid Python."""


class MisuseError(AccelNbError, RuntimeError):
    """The training API was called in a wrong order or with unsuitable objects."""


class RankMismatchError(MisuseError):
    """Ranks took part in one operation with different structures, dtypes or shapes, or in different operations."""


class UnsyncedGradientError(MisuseError):
    """An optimizer is about to step parameters whose gradients were not reduced over the ranks."""


class NanLossError(MisuseError, ArithmeticError):
    """The loss of a step is NaN. Raised before the optimizer step; steps are counted from 1."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step
        super().__init__(
            f"the loss of step {step} is NaN on rank {rank}: look for a division by zero, a logarithm of zero, a "
            "learning rate that is too high, or NaN in the data; the option sentinels=off disables this check"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.step)


class ShippingError(AccelNbError, TypeError):
    """A name that the cell uses cannot be sent to the workers."""


class UnknownNameError(AccelNbError, NameError):
    """A requested name does not exist."""


class PoolError(AccelNbError, RuntimeError):
    """A request to the worker pool failed."""


class IllegalTransition(PoolError):
    """A pool cannot change from its current state to the requested one."""


class WorkerDied(PoolError):
    """The worker process of ``rank`` ended while a request ran."""

    def __init__(self, message: str, *, rank: int) -> None:
        self.rank = rank
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), rank=self.rank), self.args


class CheckpointError(AccelNbError, RuntimeError):
    """A checkpoint cannot be written or read; older checkpoints, and the state of the training, are unchanged."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint is incomplete, damaged or malicious; the message names the file. Nothing was loaded from it."""


class NoCheckpoint(CheckpointError):
    """There is no complete checkpoint at the given location."""
