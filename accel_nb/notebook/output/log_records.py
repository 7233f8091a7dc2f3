"""Log records of a cell for those handlers of the notebook that write neither to its output nor to a file.

Such a handler (a list, a widget, rich's) cannot be copied to the workers. In its place rank 0 has a handler that sends
each record to the notebook.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

RECORD = "log"
"""The topic of messages with a log record."""
STREAMS = ("<stdout>", "<stderr>")
_NOT_SENT = frozenset({"args", "msg", "process", "relativeCreated", "thread"})
"""Attributes of a record that are not sent."""

Send = Callable[[str, dict[str, Any]], object]
"""Sends a topic and a JSON-ready body to the notebook."""


class RecordSender(logging.Handler):
    """Replaces handlers of the notebook on rank 0, and sends the records of a logger to them."""

    is_copy = True

    def __init__(self, logger: str, target: str) -> None:
        super().__init__()
        self.target = target
        self.send: Send | None = None
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, unless code of this process, as of a library, has added a handler of the same target."""
        own = logging.getLogger(self._logger or None).handlers
        if self.send is None or any(target_of(handler) == self.target for handler in own):
            return
        try:
            body = {"logger": self._logger, "target": self.target, "record": _to_json(record)}
            self.send(RECORD, body)
        except Exception:  # `logging` reports errors of handlers in one way
            self.handleError(record)


def handle_record(body: dict[str, Any]) -> None:
    """Handle a record that a `RecordSender` has sent, by the handlers of this process that it has replaced."""
    record = logging.makeLogRecord(body["record"])
    for handler in list(logging.getLogger(body["logger"] or None).handlers):
        if target_of(handler) != body["target"] or record.levelno < handler.level:
            continue
        try:
            handler.handle(record)
        except Exception:  # an error here would end the output of the cell
            handler.handleError(record)


def target_of(handler: logging.Handler) -> str | None:
    """Return the file that a handler writes to, ``<stdout>`` or ``<stderr>``, or for any other one its class.

    Handlers with filters, or with a formatter that a format string does not describe, count as other ones. None for
    copies and for handlers that do nothing.
    """
    if getattr(handler, "is_copy", False) or isinstance(handler, logging.NullHandler):
        return None
    if not handler.filters and _is_described(handler.formatter):
        target = handler.baseFilename if isinstance(handler, logging.FileHandler) else stream_of(handler)
        if target is not None:
            return target
    kind = type(handler)
    return f"<{kind.__module__}.{kind.__qualname__}>"


def stream_of(handler: logging.Handler) -> str | None:
    """Return ``<stdout>`` or ``<stderr>`` for a handler that writes to the output, else None."""
    if type(handler) is not logging.StreamHandler:
        return None
    name = str(getattr(handler.stream, "name", "")).strip("<>")
    for known in ("stdout", "stderr"):
        if name == known or handler.stream in (getattr(sys, known), getattr(sys, f"__{known}__")):
            return f"<{known}>"
    return None


def _is_described(formatter: logging.Formatter | None) -> bool:
    """Return whether a formatter is Python's own, with the formats of messages and dates and nothing else."""
    if formatter is None:
        return True
    has_defaults = any(isinstance(value, Mapping) and value for value in vars(formatter._style).values())
    is_plain = type(formatter) is logging.Formatter and {"_style", "_fmt", "datefmt"}.issuperset(vars(formatter))
    return is_plain and not has_defaults


def _to_json(record: logging.LogRecord) -> dict[str, Any]:
    """Return the arguments of `logging.makeLogRecord`, with the text of the message and of the error."""
    error = record.exc_text
    if record.exc_info and not error:
        error = logging.Formatter().formatException(record.exc_info)
    plain = {
        name: value
        for name, value in vars(record).items()
        if isinstance(value, str | int | float | None) and name not in _NOT_SENT
    }
    return {**plain, "msg": record.getMessage(), "exc_text": error}
