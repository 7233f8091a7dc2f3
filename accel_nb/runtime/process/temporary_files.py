"""Temporary files of the ranks other than rank 0, in one folder, which is removed when the process ends."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress


def make_temporary_folder(pid: int) -> str | None:
    """Create the folder for the temporary files of a process and those that it starts, if there is none, and return it.

    Return None if another user has a file or folder of this name, which would be unsafe.
    """
    path = _folder(pid)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return path if is_private else None


def remove_temporary_folder(pid: int) -> None:
    """Remove the folder for the temporary files of a process that has ended, if there is one."""
    shutil.rmtree(_folder(pid), ignore_errors=True)


def _folder(pid: int) -> str:
    return os.path.join(tempfile.gettempdir(), f"accel_nb_{os.getuid()}_{pid}")
