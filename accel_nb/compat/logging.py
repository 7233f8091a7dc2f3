"""accelerate's logger for several processes."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from accel_nb.accelerator.process.logging import RankLogger
from accel_nb.accelerator.process.logging import get_logger as build_logger


class MultiProcessAdapter(RankLogger):
    """`RankLogger` whose ``stacklevel`` 2 is the caller of the adapter, as in accelerate."""

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger)
        self.extra = extra or {}

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Return a message, and the options to log it with: ``extra`` has the items of the adapter and of the call."""
        if self.extra:
            kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        kwargs.setdefault("stacklevel", 2)
        return msg, kwargs

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Log on the ranks that the options select."""
        msg, options = self.process(msg, kwargs)
        super().log(level, msg, *args, **options)

    def warning_once(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Warn, but only once for the same message and arguments."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 2) + 1
        super().warning_once(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return a logger for several processes; see `accel_nb.get_logger`."""
    return MultiProcessAdapter(build_logger(name, log_level).logger)
