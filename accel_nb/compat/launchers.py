"""accelerate's launchers: ``import accelerate`` finds accel_nb in the workers too."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import accel_nb
from accel_nb.compat.finder import install


class _Alias:
    """Installs the alias where it is unpickled."""

    def __reduce__(self) -> Any:
        return _install_alias, ()


def _install_alias() -> _Alias:
    install()
    return _Alias()


def _call(alias: _Alias, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _under_alias(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in a partial that, when it is unpickled, installs the alias before the function's imports."""
    if not callable(function):
        return function
    wrapped = functools.partial(_call, _Alias(), function)
    functools.update_wrapper(wrapped, function, assigned=("__name__", "__doc__"), updated=())
    vars(wrapped).pop("__wrapped__", None)
    return wrapped


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Run a function on CPU workers; see `accel_nb.debug_launcher`."""
    return accel_nb.debug_launcher(_under_alias(function), args, num_processes)


def notebook_launcher(function: Callable[..., Any], args: Sequence[Any] = (), *more: Any, **options: Any) -> list[Any]:
    """Run a function on workers; see `accel_nb.notebook_launcher`."""
    return accel_nb.notebook_launcher(_under_alias(function), args, *more, **options)


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> bool:
    """Write nothing and return False, as if the file existed: the launchers find devices without a file.

    A precision has no effect here, and is reported: it is passed to the launcher or to the Accelerator.
    """
    if mixed_precision not in ("no", None):
        warnings.warn(
            f"write_basic_config(mixed_precision={mixed_precision!r}) has no effect: pass mixed_precision to "
            "notebook_launcher, or to Accelerator",
            stacklevel=2,
        )
    return False
