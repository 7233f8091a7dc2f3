"""Registry of a script's accelerators that save or resume: a launch ends their runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_built: ContextVar[list[Any] | None] = ContextVar("accel_nb_built", default=None)


@contextmanager
def record_built_accelerators() -> Iterator[list[Any]]:
    """Yield the list of accelerators that `register_built_accelerator` registers in the block."""
    built: list[Any] = []
    token = _built.set(built)
    try:
        yield built
    finally:
        _built.reset(token)


def register_built_accelerator(accelerator: Any) -> None:
    """Register an accelerator that has a checkpoint folder, or that resumes from one."""
    built = _built.get()
    if built is not None:
        built.append(accelerator)
