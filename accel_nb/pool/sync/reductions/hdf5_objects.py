"""Files, groups and datasets of h5py that are open for reading, which another process opens again.

A dataset that opens its file at its first sample holds an open one in the notebook after that sample is read there.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def is_hdf5_object(value: Any) -> bool:
    """Return whether a value is a file, a group or a dataset of h5py."""
    h5py: Any = sys.modules.get("h5py")
    return h5py is not None and isinstance(value, h5py.Group | h5py.Dataset)


def reduce_hdf5_object(value: Any) -> Any:
    """Reduce an object of h5py to its file's path and its name in the file.

    Raise TypeError for one whose file is open for writing, or has no path that another process finds.
    """
    h5py: Any = sys.modules["h5py"]
    if not value:
        return _make_closed, (type(value).__name__,)
    path = os.path.abspath(value.file.filename)
    if value.file.mode != "r" or value.file.driver != "sec2" or path.startswith("/proc/"):
        raise TypeError("it is not an HDF5 object of a file at a path that is open for reading only")
    name = None if isinstance(value, h5py.File) else value.name
    return _open, (path, os.stat(path).st_ino, name)


def _open(path: str, number: int, name: str | None) -> Any:
    h5py: Any = importlib.import_module("h5py")
    if os.stat(path).st_ino != number:
        raise OSError(f"{path!r} is another file here")
    file = h5py.File(path, "r")
    return file if name is None else file[name]


def _make_closed(kind: str) -> Any:
    h5py: Any = importlib.import_module("h5py")
    made = getattr(h5py, kind).__new__(getattr(h5py, kind))
    if kind == "Dataset":
        h5py.Dataset.__init__(made, h5py.h5d.DatasetID(0))
    else:
        h5py.Group.__init__(made, h5py.h5f.FileID(0))
    return made
