"""Handlers of loggers that the workers copy from the notebook, and those that a cell adds or removes.

Handlers that write to the output and to files are copied, and made again in the notebook if a cell adds them. Any other
one, and one with filters or a formatter of its own, is handed the records of rank 0 in the notebook (`RecordSender`).

A library adds its handlers when a process imports it. If a logger has the name of an imported module, its handlers that
write to the output are therefore not copied.
"""

from __future__ import annotations

import locale
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from accel_nb.notebook.output.log_records import STREAMS, RecordSender, Send, stream_of, target_of
from accel_nb.runtime.process.environment import get_variable
from accel_nb.runtime.process.user_code import modules_imported_after


def read_handlers() -> list[dict[str, Any]]:
    """Return the handlers of this process that workers copy or replace, JSON-ready, with their loggers' names."""
    return [item for _, item in _own_handlers()]


class ChangedHandlers:
    """The handlers of this process that a cell adds and removes from now on."""

    def __init__(self) -> None:
        self._before = read_handlers()
        self._copies = _copied_targets()
        self._last_module = next(reversed(sys.modules))

    def find(self) -> tuple[dict[str, Any], list[str]]:
        """Return the changes, for `remove_handlers` and `add_handlers` in the notebook, and lines about the others.

        Added handlers count as copies from then on: the next cell has those of the notebook in their place.
        """
        removed = sorted(self._copies - _copied_targets())
        imported = modules_imported_after(self._last_module)
        added: list[dict[str, Any]] = []
        lines: list[str] = []
        for handler, item in list(_own_handlers()):
            if item in self._before:
                continue
            replaced_target = None
            if _is_copied(item["target"]):
                replaced_target = item["target"]
                added.append({**item, "is_further": replaced_target in _targets_of_copies(item["logger"])})
            elif type(handler).__module__ not in imported:  # else a library that the cell has imported adds it
                lines.append(_ONLY_HERE.format(kind=type(handler).__name__, logger=item["logger"] or "root"))
            else:
                continue
            _mark_as_copy(handler, item, replaced_target)
        self._last_module = next(reversed(sys.modules))
        changes = {"removed_handlers": removed, "added_handlers": added}
        return {name: found for name, found in changes.items() if found}, lines


_ONLY_HERE = (
    "{kind}, which the cell has added to the logger {logger!r}, handles records on the workers only: add it in a cell "
    "without %%accelerate"
)


def remove_handlers(targets: list[list[str]]) -> None:
    """Remove the handlers whose copies a cell has removed from their loggers."""
    for name, target in targets:
        logger = logging.getLogger(name or None)
        for handler in list(logger.handlers):
            if target_of(handler) == target:
                logger.removeHandler(handler)


def add_handlers(handlers: list[dict[str, Any]]) -> None:
    """Add the handlers that a cell has added on the workers, without those that their loggers have here.

    A second handler of a logger with the same target (``is_further``) is added too.
    """
    for item in handlers:
        logger = logging.getLogger(item["logger"] or None)
        target = item["target"]
        if not item["is_further"] and any(target_of(own) == target for own in logger.handlers):
            continue
        added: logging.Handler
        if target in STREAMS:
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
            target = target_of(handler)
            if target is None or (is_of_module and stream_of(handler) is not None):
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
    is_main_rank = get_variable("RANK", "0") == "0"
    for item in handlers:
        logger = logging.getLogger(item["logger"] or None)
        target = item["target"]
        copied: logging.Handler
        if target in STREAMS:
            if any(target_of(own) == target for own in logger.handlers):
                continue  # a library's code has added it in this process too
            copied = _OutputCopy(target)
        elif not is_main_rank:
            copied = logging.NullHandler()
            copied.is_copy = True  # type: ignore[attr-defined]
        elif _is_copied(target):
            copied = _FileCopy(target, item["encoding"])
        else:
            senders = [own for own in logger.handlers if isinstance(own, RecordSender) and own.target == target]
            if senders:  # for two handlers of one class, both of which handle each record in the notebook
                senders[0].setLevel(min(senders[0].level, item["level"]))
                continue
            copied = RecordSender(item["logger"], target)
        _add(copied, logger, item)


def send_records(send: Send) -> None:
    """Make the handlers that replace others of the notebook send their records by ``send``."""
    for _, copied in _copies():
        if isinstance(copied, RecordSender):
            copied.send = send


def _add(handler: logging.Handler, logger: logging.Logger, item: dict[str, Any]) -> None:
    handler.setLevel(item["level"])
    if item["format"] is not None:
        handler.setFormatter(logging.Formatter(item["format"], item["dates"], item["style"]))
    if getattr(handler, "is_copy", False):
        _mark_as_copy(handler, item, item["target"])
    logger.addHandler(handler)
    logger.propagate = item["propagate"]


def _mark_as_copy(handler: Any, item: dict[str, Any], replaced_target: str | None) -> None:
    """Mark a handler of this process as a copy; ``replaced_target`` is the target of the notebook's, or None."""
    handler.is_copy, handler.logger_name, handler.replaced_target = True, item["logger"], replaced_target


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
        self.target = target
        self._name_of_stream = target.strip("<>")

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = getattr(sys, self._name_of_stream)
        super().emit(record)


class _FileCopy(logging.Handler):
    """A copy of a handler that writes to a file; each record is appended, since the notebook writes to it too."""

    is_copy = True

    def __init__(self, path: str, encoding: str) -> None:
        super().__init__()
        self.target = self._path = path
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
    # A visit of all loggers would copy their memory, a megabyte, in each worker.
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]
        handler = reference()
        if handler is None or not getattr(handler, "is_copy", False):
            continue
        logger = logging.getLogger(handler.logger_name or None)
        if handler in logger.handlers:
            yield logger, handler


def _copied_targets() -> set[tuple[str, str]]:
    """Return the logger's name and the target of each handler that replaces one of the notebook."""
    names = {"" if logger is logging.root else logger.name for logger, _ in _copies()}
    return {(name, target) for name in names for target in _targets_of_copies(name)}


def _targets_of_copies(name: str) -> list[str]:
    """Return the targets of the handlers of the notebook for which a logger has copies."""
    targets = [getattr(own, "replaced_target", None) for own in logging.getLogger(name or None).handlers]
    return [target for target in targets if target is not None]


def _is_copied(target: str) -> bool:
    """Return whether the workers have a copy of a handler with this target."""
    return target in STREAMS or not target.startswith("<")


def _encoding(handler: logging.Handler) -> str:
    """Return the encoding of a handler's file; logging names the one of the system ``locale``."""
    name = getattr(handler, "encoding", None)
    return locale.getpreferredencoding(False) if name in (None, "locale") else str(name)


def _style(formatter: logging.Formatter | None) -> str:
    kinds: dict[Any, str] = {kind: style for style, (kind, _) in logging._STYLES.items()}  # type: ignore[attr-defined]
    return kinds.get(type(getattr(formatter, "_style", None)), "%")
