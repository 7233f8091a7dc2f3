"""accelerate's launchers, in whose workers ``import accelerate`` imports accel_nb too."""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import accel_nb
from accel_nb.compat.names.finder import install
from accel_nb.config.yaml_documents import dump_yaml
from accel_nb.runtime.process.hardware import inspect_machine

_PRECISIONS = ("no", "fp16", "bf16", "fp8")


class _FinderInstaller:
    """Installs the import finder for ``accelerate`` in the process that unpickles it."""

    def __reduce__(self) -> Any:
        return _install_finder, ()


def _install_finder() -> _FinderInstaller:
    install()
    return _FinderInstaller()


def _call(installer: _FinderInstaller, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _with_finder(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in a partial; unpickling it installs the import finder before the function is imported."""
    if not callable(function):
        return function
    wrapped = functools.partial(_call, _FinderInstaller(), function)
    functools.update_wrapper(wrapped, function, assigned=("__name__", "__doc__"), updated=())
    vars(wrapped).pop("__wrapped__", None)
    return wrapped


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Run a function on CPU workers; see `accel_nb.debug_launcher`."""
    return accel_nb.debug_launcher(_with_finder(function), args, num_processes)


def notebook_launcher(function: Callable[..., Any], args: Sequence[Any] = (), *more: Any, **options: Any) -> list[Any]:
    """Run a function on workers; see `accel_nb.notebook_launcher`."""
    return accel_nb.notebook_launcher(_with_finder(function), args, *more, **options)


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | bool:
    """Write a file for ``--config-file`` to ``save_location`` and return its path, or False if the file exists.

    Without ``save_location`` return False and write nothing: launchers need no file to find the devices. Warn then of a
    ``mixed_precision``, which has an effect only as an argument of a launcher or of the Accelerator.
    """
    if save_location is not None:
        return _write_config(str(mixed_precision).lower(), Path(save_location).expanduser())
    if mixed_precision not in ("no", None):
        warnings.warn(
            f"write_basic_config(mixed_precision={mixed_precision!r}) has no effect: pass mixed_precision to "
            "notebook_launcher, or to Accelerator",
            stacklevel=2,
        )
    return False


def _write_config(precision: str, path: Path) -> Path | bool:
    if precision not in _PRECISIONS:
        raise ValueError(f"mixed_precision is {precision!r}; give one of {', '.join(_PRECISIONS)}")
    if path.exists():
        return False
    devices = len(inspect_machine().gpus)
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if devices > 1 else "NO",
        "mixed_precision": precision,
        "num_machines": 1,
        "num_processes": devices or 1,
        "use_cpu": not devices,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n" if path.suffix == ".json" else dump_yaml(values))
    return path
