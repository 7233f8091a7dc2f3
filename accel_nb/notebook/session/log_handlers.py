"""Handlers of loggers that the workers copy from the notebook, and those that a cell adds, which the notebook gets.

These are the handlers that write to the output, and to files.

A library adds its handlers when a process imports it. Of a logger that is named after an imported module only the
handlers that write to files are copied.
"""

from __future__ import annotations

import locale
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from accel_nb.runtime.process.environment import get_variable


def read_handlers() -> list[dict[str, Any]]:
    """Return the handlers of this process that workers copy, JSON-ready, with their loggers' names."""
    return [item for _, item in _own_handlers()]


def take_new_handlers(before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the handlers that `read_handlers` did not find before, for `add_handlers` in the notebook.

    They count as copies from then on: the next cell has those of the notebook in their place.
    """
    found: list[dict[str, Any]] = []
    for handler, item in _own_handlers():
        if item not in before:
            handler.is_copy = True  # type: ignore[attr-defined]
            found.append(item)
    return found


def add_handlers(handlers: list[dict[str, Any]]) -> None:
    """Add the handlers that a cell has added on the workers, without those that their loggers have here."""
    for item in handlers:
        logger = logging.getLogger(item["logger"] or None)
        target = item["target"]
        if any(_target(own) == target for own in logger.handlers):
            continue
        added: logging.Handler
        if target.startswith("<"):
            added = logging.StreamHandler(getattr(sys, target.strip("<>")))
        else:  # opened by its first record, since the folder may exist on the machine of the workers only
            added = logging.FileHandler(target, encoding=item["encoding"], delay=True)
        _add(added, logger, item)


def _own_handlers() -> Iterator[tuple[logging.Handler, dict[str, Any]]]:
    loggers = [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]
    for logger in (logging.root, *loggers):
        if not logger.handlers:
            continue
        is_of_module = logger.name != "__main__" and logger.name.partition(".")[0] in sys.modules
        for handler in logger.handlers:
            target = _target(handler)
            if target is None or (is_of_module and target.startswith("<")):
                continue
            formatter = handler.formatter
            item = {
                "logger": "" if logger is logging.root else logger.name,
                "propagate": logger.propagate,
                "level": handler.level,
                "target": target,
                "format": getattr(formatter, "_fmt", None),
                "dates": getattr(formatter, "datefmt", None),
                "style": _style(formatter),
                "encoding": _encoding(handler),
            }
            yield handler, item


def set_handlers(handlers: list[dict[str, Any]]) -> None:
    """Replace the copies of handlers in this process."""
    for logger, copied in list(_copies()):
        logger.removeHandler(copied)
    for item in handlers:
        logger = logging.getLogger(item["logger"] or None)
        is_main_rank = get_variable("RANK", "0") == "0"
        target = item["target"]
        copied: logging.Handler
        if not target.startswith("<"):
            copied = _FileCopy(target, item["encoding"]) if is_main_rank else logging.NullHandler()
            copied.is_copy = True  # type: ignore[attr-defined]
        elif any(_target(own) == target for own in logger.handlers):
            continue  # a library's code has added it in this process too
        else:
            copied = _OutputCopy(target)
        _add(copied, logger, item)


def _add(handler: logging.Handler, logger: logging.Logger, item: dict[str, Any]) -> None:
    handler.setLevel(item["level"])
    if item["format"] is not None:
        handler.setFormatter(logging.Formatter(item["format"], item["dates"], item["style"]))
    logger.addHandler(handler)
    logger.propagate = item["propagate"]


def seek_ends() -> None:
    """Move open log files of this process to their ends, since a worker may have written to them."""
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]
        handler = reference()
        stream = getattr(handler, "stream", None)
        if isinstance(handler, logging.FileHandler) and stream is not None and not stream.closed and stream.seekable():
            stream.seek(0, os.SEEK_END)


class _OutputCopy(logging.StreamHandler):
    """A copy of a handler that writes to the output of the cell; the stream is looked up for each record."""

    is_copy = True

    def __init__(self, target: str) -> None:
        super().__init__()
        self._name_of_stream = target.strip("<>")

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = getattr(sys, self._name_of_stream)
        super().emit(record)


class _FileCopy(logging.Handler):
    """A copy of a handler that writes to a file; each record is appended, since the notebook writes to it too."""

    is_copy = True

    def __init__(self, path: str, encoding: str) -> None:
        super().__init__()
        self._path = path
        self._encoding = encoding

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) + "\n"
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            with os.fdopen(descriptor, "ab") as file:
                file.write(text.encode(self._encoding, "backslashreplace"))
        except Exception:  # `logging` reports errors of handlers in one way
            self.handleError(record)


def _copies() -> Iterator[tuple[logging.Logger, logging.Handler]]:
    loggers = [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]
    for logger in (logging.root, *loggers):
        for handler in list(logger.handlers):
            if getattr(handler, "is_copy", False):
                yield logger, handler


def _target(handler: logging.Handler) -> str | None:
    """Return the file that a handler writes to, or ``<stdout>`` or ``<stderr>``; None for any other handler."""
    if isinstance(handler, logging.FileHandler):
        return handler.baseFilename
    if type(handler) is not logging.StreamHandler:
        return None
    name = str(getattr(handler.stream, "name", "")).strip("<>")
    for known in ("stdout", "stderr"):
        if name == known or handler.stream in (getattr(sys, known), getattr(sys, f"__{known}__")):
            return f"<{known}>"
    return None


def _encoding(handler: logging.Handler) -> str:
    """Return the encoding of a handler's file; logging names the one of the system ``locale``."""
    name = getattr(handler, "encoding", None)
    return locale.getpreferredencoding(False) if name in (None, "locale") else str(name)


def _style(formatter: logging.Formatter | None) -> str:
    kinds: dict[Any, str] = {kind: style for style, (kind, _) in logging._STYLES.items()}  # type: ignore[attr-defined]
    return kinds.get(type(getattr(formatter, "_style", None)), "%")
