"""The values of cells that IPython keeps: ``_``, ``Out`` and others, which the workers' cells read and set too."""

from __future__ import annotations

from typing import Any

from IPython.core.getipython import get_ipython

from accel_nb.pool.sync.objects.object_kinds import is_array_scalar, is_plain_array, is_tensor

KEPT_NAMES = frozenset({"_", "__", "___", "In", "Out", *(f"_{name}" for name in ("oh", "ih", "i", "ii", "iii"))})
"""Names that IPython binds to the values and the sources of earlier cells."""
OUTPUT_NAME = "_accel_nb_output"
"""The name under which a worker returns the value of a cell's last expression."""

_MAX_BYTES = 2**20
_MAX_ITEMS = 1000


def bind_output(namespace: dict[str, Any], value: Any) -> None:
    """Bind the value of a cell's last expression, if it is data of little size, or has a name, to be returned."""
    namespace.pop(OUTPUT_NAME, None)
    if value is not None and (_is_small(value) or any(item is value for item in list(namespace.values()))):
        namespace[OUTPUT_NAME] = value


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
    items = value.values() if type(value) is dict else value
    if type(value) in (list, tuple, dict):
        return depth < 3 and len(value) <= _MAX_ITEMS and all(_is_small(item, depth + 1) for item in items)
    return isinstance(value, str | bytes | int | float | complex | None)
