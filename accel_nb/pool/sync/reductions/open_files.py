"""Open files of the notebook that cells use on the workers, and files of cells that the notebook continues to use.

The receiver opens the file's path at the same position. Every rank reads the file itself, but only rank 0 writes to it:
other ranks write to temporary files without a name. After a cell the position of the notebook's file is set to that of
rank 0's file.
"""

from __future__ import annotations

import csv
import gc
import io
import os
import stat
import tempfile
from dataclasses import dataclass
from typing import Any

from accel_nb.runtime.process.environment import get_variable

_KINDS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedReader, io.BufferedRandom, io.FileIO)
_CSV_WRITER = type(csv.writer(io.StringIO()))
_LINE_ENDS = ("", "\n", "\r", "\r\n")
_DIALECT = (
    *("delimiter", "doublequote", "escapechar", "lineterminator", "quotechar", "quoting", "skipinitialspace", "strict"),
)


@dataclass(frozen=True, slots=True)
class FilePosition:
    """The position of a file, as its ``tell`` returns it; None for a closed one."""

    position: int | None


def is_file_object(value: Any) -> bool:
    """Return whether a value is a file object of the module ``io``, in any mode."""
    return type(value) in _KINDS


def is_reopenable_file(value: Any) -> bool:
    """Return whether a value is a file with a path, open for reading only or for writing only, or closed after that.

    False for pipes, devices and files that are open for both, which another process cannot open in the same state.
    """
    if not is_file_object(value):
        return False
    try:
        path, mode = value.name, _mode_of(value)
        return isinstance(path, str) and "+" not in mode and (value.closed or _is_at(path, value))
    except (OSError, ValueError, AttributeError):  # it has no descriptor, or its path is gone
        return False


def is_open_for_writing(value: Any) -> bool:
    """Return whether a value is a file with a path that can be written to."""
    return is_reopenable_file(value) and not value.closed and value.writable()


def _is_at(path: str, file: Any) -> bool:
    known, found = os.fstat(file.fileno()), os.stat(path)
    return stat.S_ISREG(known.st_mode) and os.path.samestat(known, found)


def file_kind_and_position(file: Any) -> tuple[Any, FilePosition] | None:
    """Return ``(kind, position)`` of a file, after flushing it; None if that fails, or while a loop reads lines."""
    kind = (type(file), file.name, _mode_of(file))
    if file.closed:
        return kind, FilePosition(None)
    try:
        if file.writable():
            file.flush()
        return kind, FilePosition(file.tell())
    except OSError:
        return None


def set_position(file: Any, position: FilePosition) -> None:
    """Move a file to another process's position, or close it if that process has closed it."""
    if position.position is None:
        file.close()
    else:
        file.seek(position.position)


def reduce_file(file: Any) -> Any:
    """Reduce a file to its path, its mode and settings, and its position.

    Raise TypeError while a loop reads its lines, and for a file for which `is_reopenable_file` is false. Raise OSError
    if written data cannot be saved, as on a full disk.
    """
    if not is_reopenable_file(file):
        raise TypeError("it is not a file at a path that is open for reading only or for writing only")
    if not file.closed and file.writable():
        file.flush()
    if (found := file_kind_and_position(file)) is None:
        raise TypeError("a loop reads its lines, and its position cannot be copied")
    (_, path, mode), position = found[0], found[1].position
    if position is None:
        return _open_closed, (path, mode)
    options: dict[str, Any] = {}
    has_line_buffer = False
    if isinstance(file, io.TextIOWrapper):
        options = {"encoding": file.encoding, "errors": file.errors, "newline": _newline_of(file, position)}
        has_line_buffer = file.line_buffering
    elif isinstance(file, io.FileIO):
        options = {"buffering": 0}
    return _open, (path, mode, options, has_line_buffer, os.fstat(file.fileno()).st_ino, position)


def _open(path: str, mode: str, options: dict[str, Any], has_line_buffer: bool, inode: int, position: int) -> Any:
    status = os.stat(path)
    if status.st_ino != inode:
        raise OSError(f"the file at {path!r} on this machine is not the one that the notebook has opened")

    def open_there(name: str, flags: int) -> int:
        if "r" in mode or get_variable("RANK", "0") == "0":
            return os.open(name, flags & ~(os.O_TRUNC | os.O_EXCL | os.O_CREAT))
        with tempfile.TemporaryFile() as nameless:
            nameless.truncate(status.st_size)
            return os.dup(nameless.fileno())

    file: Any = open(path, mode, opener=open_there, **options)  # noqa: SIM115
    if has_line_buffer:
        file.reconfigure(line_buffering=True)
    file.seek(position)
    return file


def _open_closed(path: str, mode: str) -> Any:
    options: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8"}
    file: Any = open(path, mode, opener=lambda name, flags: os.open(os.devnull, os.O_RDWR), **options)  # noqa: SIM115
    file.close()
    return file


def _mode_of(file: Any) -> str:
    return file.mode if isinstance(file, io.TextIOWrapper | io.FileIO) else file.raw.mode


def _newline_of(file: io.TextIOWrapper, position: int) -> str | None:
    """Return the argument ``newline`` that a file was opened with, which is among the objects that it references."""
    if file.readable():
        file.seek(position)  # drops the text that was read ahead, which may be a line end too
    return next((item for item in gc.get_referents(file) if item in _LINE_ENDS), None)


def is_csv_writer(value: Any) -> bool:
    """Return whether a value is a writer of the module ``csv``."""
    return type(value) is _CSV_WRITER


def reduce_csv_writer(writer: Any) -> Any:
    """Reduce a writer to the file that it writes to, and its dialect."""
    return _csv_writer, (file_of(writer), {name: getattr(writer.dialect, name) for name in _DIALECT})


def file_of(writer: Any) -> Any:
    """Return the file that a writer of the module ``csv`` writes to."""
    methods = (item for item in gc.get_referents(writer) if hasattr(item, "__self__"))
    return next(methods).__self__


def _csv_writer(file: Any, dialect: dict[str, Any]) -> Any:
    return csv.writer(file, **dialect)
