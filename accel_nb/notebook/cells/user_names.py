"""A view of a notebook's namespace with the user's names only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from accel_nb.notebook.cells.outputs import KEPT_NAMES

ACCELERATOR_NAME = "accelerator"
"""The name that workers bind to the accelerator of a cell. The notebook's own value of this name is not sent."""


class UserNames(Mapping[str, Any]):
    """A view of a namespace without `ACCELERATOR_NAME`, the ``hidden`` names of the shell, and names as ``__doc__``.

    A look-up copies nothing and is O(1), since a long session has thousands of names.
    """

    def __init__(self, namespace: Mapping[str, Any], hidden: Collection[str]) -> None:
        self._namespace = namespace
        self._hidden = hidden

    def __getitem__(self, name: str) -> Any:
        if not self._is_user_name(name):
            raise KeyError(name)
        return self._namespace[name]

    def __contains__(self, name: object) -> bool:
        return name in self._namespace and self._is_user_name(name)

    def __iter__(self) -> Iterator[str]:
        return filter(self._is_user_name, list(self._namespace))  # other threads may bind names meanwhile

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _is_user_name(self, name: Any) -> bool:
        is_special = is_reserved(name) and name not in KEPT_NAMES
        return name not in self._hidden and not is_special and name != ACCELERATOR_NAME


def is_reserved(name: str) -> bool:
    """Return whether a name begins and ends with two underscores, as those that Python binds in modules."""
    return name.startswith("__") and name.endswith("__")
