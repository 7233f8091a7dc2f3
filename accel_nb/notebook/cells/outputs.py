"""The values of cells that IPython keeps: ``_``, ``Out`` and others, which the workers' cells read and set too."""

from __future__ import annotations

from typing import Any

from IPython.core.getipython import get_ipython

from accel_nb.pool.sync.objects.object_kinds import is_array_scalar, is_frame, is_plain_array, is_tensor

KEPT_NAMES = frozenset({"_", "__", "___", "In", "Out", *(f"_{name}" for name in ("oh", "ih", "i", "ii", "iii"))})
"""Names that IPython binds to the values and the sources of earlier cells."""
OUTPUT_NAME = "_accel_nb_output"
"""The name under which a worker returns the value of a cell's last expression."""

_MAX_BYTES = 2**20
_MAX_ITEMS = 1000


class StayedOnWorkers:
    """Stands in the notebook for the value of a cell's last expression, which the workers have kept."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<{self._describe()}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # code that looks for a display or a protocol
            raise AttributeError(name)
        raise AttributeError(f"no attribute {name!r}: {self._describe()}")

    def _describe(self) -> str:
        return f"the value of the last expression, of type {self._kind}, stayed on the workers: bind it to a name"


def bind_output(namespace: dict[str, Any], value: Any) -> None:
    """Bind the value of a cell's last expression to be returned, if it is data of little size, or has a name.

    Another value is returned as a `StayedOnWorkers`.
    """
    namespace.pop(OUTPUT_NAME, None)
    if value is None:
        return
    is_returned = _is_small(value) or any(item is value for item in list(namespace.values()))
    namespace[OUTPUT_NAME] = value if is_returned else StayedOnWorkers(type(value).__name__)


def keep_output(namespace: dict[str, Any], *, is_of_this_cell: bool) -> bool:
    """Keep the returned value of the cell as IPython does that of any other; return whether there is one."""
    if OUTPUT_NAME not in namespace:
        return False
    value, shell = namespace.pop(OUTPUT_NAME), get_ipython()
    if shell is not None and is_of_this_cell:
        shell.displayhook.update_user_ns(value)
    return True


def _is_small(value: Any, depth: int = 0) -> bool:
    if is_tensor(value):
        return value.numel() * value.element_size() <= _MAX_BYTES  # a sparse tensor has no `nbytes`
    if is_plain_array(value) or is_array_scalar(value):
        return value.nbytes <= _MAX_BYTES
    if is_frame(value):
        return value.size <= _MAX_BYTES // 8 and _frame_bytes(value) <= _MAX_BYTES
    items = value.values() if type(value) is dict else value
    if type(value) in (list, tuple, dict):
        return depth < 3 and len(value) <= _MAX_ITEMS and all(_is_small(item, depth + 1) for item in items)
    return isinstance(value, str | bytes | int | float | complex | None)


def _frame_bytes(frame: Any) -> int:
    used = frame.memory_usage(deep=True)  # of a table one number for each column
    return int(used.sum()) if hasattr(used, "sum") else used
