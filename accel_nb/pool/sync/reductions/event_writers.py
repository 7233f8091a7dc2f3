"""TensorBoard writers of a notebook that cells use on the workers, and writers of cells that the notebook uses.

A writer is sent without its open file. It opens a new one in the same folder when it is used again, as torch's and
tensorboardX's writers do after ``close()``. Readers follow the newest file of a folder only, so a writer is closed in
the one process before it is used in the other.
"""

from __future__ import annotations

import copyreg
import gc
import sys
from typing import Any

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


def close_event_writers() -> None:
    """Close every writer of this process, whatever refers to it."""
    for kind in _writer_classes():
        for value in gc.get_referrers(kind):  # an instance refers to its class
            if type(value) is kind:
                value.close()


def _writer_classes() -> list[type]:
    modules = (sys.modules.get(f"{package}.writer") for package in _PACKAGES)
    found: list[type] = [kind for module in modules if (kind := getattr(module, "SummaryWriter", None)) is not None]
    for kind in found:
        found += (derived for derived in type.__subclasses__(kind) if derived not in found)
    return found
