"""TensorBoard writers of a notebook that cells use on the workers, and writers of cells that the notebook uses.

A writer is sent without its open file. It opens a new one in the same folder when it is used again, as torch's and
tensorboardX's writers do after ``close()``. Readers follow the newest file of a folder only, so a writer is closed in
the one process before it is used in the other.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterable
from typing import Any

from accel_nb.pool.sync.object_kinds import attributes_of

_PACKAGES = ("torch.utils.tensorboard", "tensorboardX")


def is_event_writer(value: Any) -> bool:
    """Return whether a value is a ``SummaryWriter``, or of a class derived from one."""
    return any(
        kind.__name__ == "SummaryWriter" and kind.__module__.startswith(_PACKAGES) for kind in type(value).__mro__
    )


def reduce_event_writer(writer: Any) -> Any:
    """Close a writer, and reduce it to its folder and settings."""
    writer.close()
    state = {**vars(writer), "file_writer": None, "all_writers": None}
    return copyreg.__newobj__, (type(writer),), state  # type: ignore[attr-defined]


def close_event_writers(values: Iterable[Any]) -> None:
    """Close the writers among some values and the attributes of these."""
    if not any(package in sys.modules for package in _PACKAGES):
        return
    for value in values:
        for item in (value, *(attributes_of(value) or {}).values()):
            if is_event_writer(item):
                item.close()
