"""Which accelerators a script has built that save or resume: a launch ends their runs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_built: ContextVar[list[Any] | None] = ContextVar("accel_nb_built", default=None)


@contextmanager
def noting_built() -> Iterator[list[Any]]:
    """Give the list of what `note_built` is told inside of the block."""
    built: list[Any] = []
    token = _built.set(built)
    try:
        yield built
    finally:
        _built.reset(token)


def note_built(accelerator: Any) -> None:
    """Hear of an accelerator that has a folder for checkpoints, or one to resume from."""
    built = _built.get()
    if built is not None:
        built.append(accelerator)
