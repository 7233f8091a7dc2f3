"""Temporary files of the ranks other than the first: they are in one folder, which is removed when the process ends."""

from __future__ import annotations

import os
import shutil
import tempfile


def temporary_folder(pid: int) -> str:
    """Return the folder for the temporary files of a process."""
    return os.path.join(tempfile.gettempdir(), f"accel_nb_{os.getuid()}_{pid}")


def remove_temporary_folder(pid: int) -> None:
    """Remove the folder for the temporary files of a process that has ended, if there is one."""
    shutil.rmtree(temporary_folder(pid), ignore_errors=True)
