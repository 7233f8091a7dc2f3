"""Loggers for several ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.current_world import current_comm, current_world

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter  # takes no type before Python 3.11


class RankLogger(Adapter):
    """A logger that logs on the main process only, by default.

    With ``main_process_only=False`` a call logs on every rank, with the rank as prefix; with ``in_order=True`` ranks do
    so one after another. For ``in_order`` every rank must make the call, whatever its level is.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._warned: set[tuple[str, tuple[Any, ...]]] = set()

    def log(
        self, level: int, msg: object, *args: Any, main_process_only: bool = True, in_order: bool = False, **kwargs: Any
    ) -> None:
        """Log on the ranks that the options select."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        world = current_world()
        text = f"[rank {world.rank}] {msg}" if world.size > 1 and (in_order or not main_process_only) else msg
        if not in_order:
            if self.isEnabledFor(level) and (world.is_main or not main_process_only):
                self.logger.log(level, text, *args, **kwargs)
            return
        comm = current_comm()
        for rank in range(comm.world.size):
            if rank == comm.world.rank and self.isEnabledFor(level):
                self.logger.log(level, text, *args, **kwargs)
            comm.barrier()

    def warning_once(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Warn, but only once for the same message and arguments."""
        key = (msg, tuple(repr(arg) for arg in args))
        if key not in self._warned:
            self._warned.add(key)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.log(logging.WARNING, msg, *args, **kwargs)


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Return a rank-aware logger over ``logging.getLogger(name)``.

    ``log_level`` sets the level of this logger, not of the root logger. Raises `MisuseError` for an unknown level.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        try:
            logger.setLevel(log_level.upper() if isinstance(log_level, str) else log_level)
        except (ValueError, TypeError) as error:
            allowed = "debug, info, warning, error or critical"
            raise MisuseError(f"log_level is {log_level!r}; it must be {allowed}") from error
    return RankLogger(logger)
