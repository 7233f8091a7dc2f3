"""Functions of torch and of other libraries that are replaced while a plain cell runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from accel_nb.accelerator.plain_cells.replacements.imported_names import ImportedNames

Make = Callable[[Any], Any]
"""Returns the replacement of a function."""

_INHERITED = object()


class ReplacedFunctions:
    """Replaces functions of modules and classes until `restore`; each replacement is made once, and kept for later."""

    def __init__(self) -> None:
        # By owner, name and function: its replacement.
        self._made: dict[tuple[Any, str, Any], Any] = {}
        # By owner and name: the owner's own attribute before; `_INHERITED` if it had inherited the function.
        self._replaced: list[tuple[Any, str, Any]] = []
        self._imported = ImportedNames()

    def replace(self, owners: Sequence[Any], name: str, make: Make) -> list[tuple[Any, Any]]:
        """Replace a function by ``make(function)``, and return both for each owner."""
        pairs: list[tuple[Any, Any]] = []
        for owner in owners:
            original = getattr(owner, name)
            replacement = self._made.get((owner, name, original))
            if replacement is None:
                replacement = self._made[owner, name, original] = make(original)
            self._imported.add(original, owner, name, replacement)
            pairs.append((original, replacement))
            self._replaced.append((owner, name, vars(owner).get(name, _INHERITED)))
            setattr(owner, name, replacement)
        return pairs

    def replace_all(self, functions: Iterable[tuple[Any, str, Make]]) -> None:
        """Replace functions, each given by its owner, its name and the factory of the replacement."""
        for owner, name, make in functions:
            self.replace((owner,), name, make)

    def replace_new(self, functions: Iterable[tuple[Any, str, Make]]) -> None:
        """Replace the given functions, except for those already replaced."""
        replaced = {(owner, name) for owner, name, _ in self._replaced}
        self.replace_all(item for item in functions if item[:2] not in replaced)

    def bind_imported(self, namespace: dict[str, Any]) -> None:
        """Bind the names by which a notebook and the user's modules have imported functions to the replacements."""
        self._imported.apply(namespace)

    def restore(self, namespace: dict[str, Any]) -> None:
        """Restore all functions, and the names of a notebook and of the user's modules that refer to replacements."""
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if own is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._imported.restore(namespace)
