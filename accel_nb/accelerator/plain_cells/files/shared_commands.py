"""Commands that the code of a plain cell starts: rank 0 runs them, and all ranks get the result.

All ranks run the code of a plain cell, and each would append the same line to a log or download the same file. The
command starts when every rank has reached it, and no rank continues before it has ended.

Processes that run in the background (``subprocess.Popen``, ``%%bash --bg``) have no result to send: every rank starts
its own, and a warning says so. Commands of libraries are not shared, nor those in code that torch calls, such as a
dataset's: torch may call it on some ranks only, or with other samples.
"""

from __future__ import annotations

import base64
import functools
import os
import subprocess
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accel_nb.accelerator.plain_cells.cell_warnings import warn_background_process
from accel_nb.accelerator.plain_cells.files.file_writes import PrivateFiles
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.process.user_code import is_user_module

_SUBPROCESS_FUNCTIONS = ("run", "call", "check_call", "check_output", "getoutput", "getstatusoutput")
_IPYTHON_FUNCTIONS = ("system", "getoutput", "get_output_error_code")
"""Functions that run the commands of ``!`` lines, where IPython's shell has imported them."""
_POLL_S = 0.002

_CALLING_MODULES = ("torch", "accel_nb.accelerator", "accel_nb.data")
"""Modules that may call the user's code on some ranks only, or with other samples on each rank."""

_PlainValue = bool | int | float | str | bytes | None
"""Types of the arguments of errors that can be sent."""

Function = Callable[..., Any]


class SharedCommands:
    """Runs the commands of one cell. Every rank must start the same ones in the same order."""

    def __init__(self, comm: Communicator, files: PrivateFiles) -> None:
        self._comm = comm
        self._files = files
        # The process that runs the cell: a child process may have a copy of this object. None if no cell runs, in which
        # case a library may still call a replacement.
        self._process: int | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share commands while the block runs."""
        self._process = os.getpid()
        try:
            yield
        finally:
            self._process = None

    def replacements(self) -> Iterator[tuple[Any, str, Callable[[Function], Function]]]:
        """Yield the functions to replace: their owner, their name, and a function that returns the replacement."""
        yield os, "system", self._share_command
        yield os, "popen", self._warn_and_call
        yield subprocess.Popen, "__init__", self._warn_and_call
        for name in _SUBPROCESS_FUNCTIONS:
            yield subprocess, name, self._share_command
        shell = sys.modules.get("IPython.core.interactiveshell")
        for name in _IPYTHON_FUNCTIONS:
            if hasattr(shell, name):
                yield shell, name, self._share_command
        if (scripts := sys.modules.get("IPython.core.magics.script")) is not None:
            yield scripts.ScriptMagics, "shebang", self._share_script

    def _share_command(self, original: Function) -> Function:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._is_called_by_cell():
                return original(*args, **kwargs)
            return self._run(lambda: original(*args, **kwargs), kwargs.get("args", args[0] if args else None))

        return run

    def _warn_and_call(self, original: Function) -> Function:
        @functools.wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            if self._is_called_by_cell():
                warn_background_process(self._comm.world)
            return original(*args, **kwargs)

        return start

    def _share_script(self, original: Function) -> Function:
        """Return a method that shares the scripts of cell magics, such as ``%%bash``.

        ``original`` is the method by which IPython runs the script of every such magic.
        """

        @functools.wraps(original)
        def shebang(magics: Any, line: str, cell: str) -> None:
            if not self._is_called_by_cell():
                return original(magics, line, cell)
            if "--bg" in line.split():
                warn_background_process(self._comm.world)
                return original(magics, line, cell)
            names = magics.shell.user_ns

            def run() -> tuple[tuple[str, str], ...]:
                """Run the script, and return the names that it has bound to its output, with the values."""
                before = dict(names)
                original(magics, line, cell)
                return tuple((name, value) for name, value in names.items() if before.get(name) is not value)

            command = (cell if cell.endswith("\n") else f"{cell}\n").encode()  # as IPython puts it into an error
            names.update(self._run(run, command))
            return None

        return shebang

    def _run(self, run: Callable[[], Any], command: Any) -> Any:
        """Return the result of ``run``, which rank 0 calls, or raise its error; all ranks must call."""
        before = self._files.signatures()
        key, *_ = self._comm.all_gather_json(uuid.uuid4().hex)
        if self._comm.world.is_main:
            try:
                result = run()
            except Exception as error:
                self._finish(key, _pack_error(error))
                raise
            self._finish(key, {"result": _pack(result)})
            return result
        while not DefaultGroup.has_flag(key):  # a collective would end after the group's timeout
            time.sleep(_POLL_S)
        message = self._comm.broadcast_json(None)
        self._files.refresh(before)
        self._comm.barrier()
        return _unpack(message, command)

    def _finish(self, key: str, message: dict[str, Any]) -> None:
        """Send the result, and wait until the other ranks have updated their versions of changed files."""
        DefaultGroup.set_flag(key)
        self._comm.broadcast_json(message)
        self._comm.barrier()

    def _is_called_by_cell(self) -> bool:
        """Return whether the user's code is the caller, on the main thread, and not called by torch or a loader."""
        if os.getpid() != self._process or threading.current_thread() is not threading.main_thread():
            return False
        modules = list(_calling_modules())
        is_called_by_library = any(
            module == name or module.startswith(f"{name}.") for name in _CALLING_MODULES for module in modules
        )
        nearest = next((name for name in modules if not name.startswith("IPython.")), None)
        return not is_called_by_library and is_user_module(nearest)


def _calling_modules() -> Iterator[str]:
    """Yield the modules of the callers, without the nearest ones of this package: these are replacements."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("accel_nb."):
        frame = frame.f_back
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def _pack(value: Any) -> Any:
    """Return a result as JSON can represent it."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"tuple": [_pack(item) for item in value]}
    if isinstance(value, subprocess.CompletedProcess):
        return {"process": [_pack(item) for item in (value.returncode, value.stdout, value.stderr)]}
    return value


def _pack_error(error: Exception) -> dict[str, Any]:
    if isinstance(error, subprocess.CalledProcessError):
        return {"failed": [_pack(item) for item in (error.returncode, error.output, error.stderr)]}
    if isinstance(error, subprocess.TimeoutExpired):
        return {"expired": [_pack(item) for item in (error.timeout, error.output, error.stderr)]}
    if isinstance(error, OSError) and error.errno is not None:
        return {"os": [error.errno, error.strerror, None if error.filename is None else os.fsdecode(error.filename)]}
    kind, has_plain_args = type(error), all(isinstance(item, _PlainValue) for item in error.args)
    args = [_pack(item) for item in error.args] if has_plain_args else None
    return {"other": [f"{kind.__name__}: {error}", kind.__module__, kind.__qualname__, args]}


def _unpack(message: dict[str, Any], command: Any) -> Any:
    """Return the result of rank 0's ``command``, or raise its error."""
    (kind, value), *_ = message.items()
    if kind == "result":
        return _unpack_result(value, command)
    if kind == "other":
        text, module, name, args = value
        raise _unpack_error(text, module, name, args, command)
    first, *rest = (_unpack_result(item, command) for item in value)
    if kind == "os":
        raise OSError(first, *rest)
    if kind == "expired":
        raise subprocess.TimeoutExpired(command, first, *rest)
    raise subprocess.CalledProcessError(first, command, *rest)


def _unpack_error(text: str, module: str, name: str, args: list[Any] | None, command: Any) -> Exception:
    """Return an error of the same class as rank 0's, or a RuntimeError if its arguments are not plain values."""
    found: Any = getattr(sys.modules.get(module), name, None)
    if args is not None and isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(*(_unpack_result(item, command) for item in args))
        except TypeError:  # its class takes other arguments than it stores
            pass
    return RuntimeError(f"the command has failed on rank 0 with {text}")


def _unpack_result(value: Any, command: Any) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "bytes":
        return base64.b64decode(content)
    items = [_unpack_result(item, command) for item in content]
    return tuple(items) if kind == "tuple" else subprocess.CompletedProcess(command, *items)
