"""Detection of user code in loaded modules and on the stack: the notebook, and files outside of installed packages."""

from __future__ import annotations

import logging
import sys
import threading
import types
import warnings
from collections.abc import Collection, Iterator
from itertools import takewhile
from typing import Any

from accel_nb.installed_files import is_of_library, is_of_package

_OWN = "accel_nb"


def is_user_module(module: str | None) -> bool:
    """Return whether a module is the user's: the notebook, or a file of neither the standard library nor a package."""
    if module == "__main__":
        return True
    if module is None or module.partition(".")[0] == _OWN:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not is_of_library(file)


def is_of_other_library(module: str | None) -> bool:
    """Return whether a module is neither the user's nor this package's."""
    return module is not None and module.partition(".")[0] != _OWN and not is_user_module(module)


def modules_imported_after(module: str) -> list[str]:
    """Return the names of the modules that were imported after another one, newest first.

    Those that were imported before it are in memory that a worker shares with the other workers. Reading one of them
    would change its reference count, which copies the page of memory.
    """
    # Without bytecode in between, another thread cannot import while this iterates.
    return list(takewhile(module.__ne__, reversed(sys.modules)))


def is_in_other_thread() -> bool:
    """Return whether this is a thread that Python code has started; autograd's threads for devices are not."""
    if threading.get_ident() == threading.main_thread().ident:
        return False
    return not threading.current_thread().name.startswith("Dummy-")  # Python's name of a thread that it did not start


def is_called_by_user() -> bool:
    """Return whether the nearest caller, other than torch and accel_nb, is code of the user and not of a library."""
    frame = sys._getframe(1)
    while frame is not None:
        if _package(frame) not in (_OWN, "torch"):
            return is_user_module(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return False


def is_called_by_accelerator() -> bool:
    """Return whether torch, called by this package, calls the caller: then a prepared optimizer steps."""
    frame = sys._getframe(2)
    while frame is not None and _package(frame) == "torch":
        frame = frame.f_back
    return frame is not None and _package(frame) == _OWN


def user_frame() -> types.FrameType | None:
    """Return the nearest calling frame whose code the user has written; None if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_module(_module_name(frame)):
        frame = frame.f_back
    return frame


def _package(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def _module_name(frame: types.FrameType) -> str:
    """Return the name of a frame's module; for one that ``python -m`` runs, its import name."""
    return getattr(frame.f_globals.get("__spec__"), "name", None) or frame.f_globals.get("__name__", "")


def cell_frames(namespace: dict[str, Any]) -> Iterator[types.FrameType]:
    """Yield the frames from the caller's up to the cell's own, except this package's."""
    frame = sys._getframe(1)
    while frame is not None:
        if _package(frame) != _OWN:
            yield frame
        if frame.f_globals is namespace and frame.f_code.co_name == "<module>":
            return
        frame = frame.f_back


def is_run_by_library(namespace: dict[str, Any], besides: Collection[str] = ()) -> bool:
    """Return whether an installed package, other than torch and ``besides``, is among the callers up to the cell."""
    return not calling_packages(namespace) <= set(besides)


def calling_packages(namespace: dict[str, Any]) -> set[str]:
    """Return the names of the installed packages, other than torch, among the callers up to the cell."""
    modules = {frame.f_globals.get("__name__", "") for frame in cell_frames(namespace)}
    return {module.partition(".")[0] for module in modules if _is_installed(module)} - {"torch"}


def _is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and is_of_package(file)


def warn_at_user_line(message: str) -> None:
    """Warn at the user's line, whatever the warning filters are, and where warnings are logged too."""
    frame = user_frame()
    location = ("<cell>", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        if (show := logging._warnings_showwarning) is not None:  # type: ignore[attr-defined]
            warnings.showwarning = show  # without `logging.captureWarnings`, whose logger may have no handler
        warnings.warn_explicit(message, UserWarning, *location)
