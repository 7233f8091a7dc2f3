"""accelerate's logger for several processes."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from accel_nb.accelerator.process.logging import RankLogger
from accel_nb.accelerator.process.logging import get_logger as build_logger


class MultiProcessAdapter(RankLogger):
    """`RankLogger`, where a ``stacklevel`` counts from this class, as in accelerate."""

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger)
        self.extra = extra or {}

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Return a message and the options with which it is logged."""
        kwargs.setdefault("stacklevel", 2)
        return msg, kwargs

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Log on the ranks that the options select."""
        msg, options = self.process(msg, kwargs)
        super().log(level, msg, *args, **options)


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return a logger for several processes; see `accel_nb.get_logger`."""
    return MultiProcessAdapter(build_logger(name, log_level).logger)
