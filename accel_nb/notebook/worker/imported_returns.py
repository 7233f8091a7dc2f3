"""Attributes that a cell on the workers sets on imported modules and classes, which are returned to the notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from accel_nb.notebook.session.imported_changes import RETURNED_NAME
from accel_nb.notebook.session.module_assignments import ModuleAssignments
from accel_nb.pool.sync.change_detection import fingerprint_of
from accel_nb.pool.sync.imported_attributes import (
    EXTENDED_CLASSES,
    AssignedAttribute,
    ImportedAttributes,
    ImportedPath,
    describe_copy_problem,
    imported_under_names,
    is_changed_in_place,
    read_assigned,
)
from accel_nb.pool.sync.objects.shared_ids import SharedObjects
from accel_nb.runtime.process.user_code import modules_imported_after


class ImportedReturns:
    """The values of some attributes before a cell, which those after the cell are compared with."""

    def __init__(self, assigned: Iterable[str], namespace: dict[str, Any]) -> None:
        """Read the values of ``assigned``, the attributes that the cell may set (`RunRequest.assigned`)."""
        self._assigned = [*EXTENDED_CLASSES, *(AssignedAttribute.from_text(text) for text in assigned)]
        self._namespace = namespace
        self._newest_module = next(reversed(sys.modules))
        self._before = self._read()

    def ids(self) -> SharedObjects:
        """Return the ids of the objects that the attributes have now, for values that refer to them."""
        return ImportedAttributes(read_assigned(self._assigned, self._namespace)).ids()

    def bind_changed(self, bound: Iterable[str]) -> list[str]:
        """Bind the attributes that have changed to `RETURNED_NAME`; return a line if some of them cannot be copied.

        ``bound`` are names that the cell may have bound. Names of a module's objects must refer to the notebook's
        objects.
        """
        self._namespace.pop(RETURNED_NAME, None)
        modules = modules_imported_after(self._newest_module)
        # `from module import *` binds names that the code of the cell does not show.
        self._assigned += imported_under_names([*self._namespace] if modules else bound, self._namespace)
        self._assigned += ModuleAssignments().find(modules)
        changed: dict[ImportedPath, Any] = {}
        problems: list[str] = []
        for path, (value, fingerprint) in self._read().items():
            before = self._before.get(path)
            if before is not None and before[0] is value and before[1] == fingerprint:
                continue
            problem = describe_copy_problem(value, self._namespace)
            if problem is None:
                changed[path] = value
            else:
                problems.append(f"{path.to_text()} ({problem})")
        if changed:
            self._namespace[RETURNED_NAME] = ImportedAttributes(changed)
        return [f"stayed on the workers: {', '.join(problems)}"] if problems else []

    def _read(self) -> dict[ImportedPath, tuple[Any, Any]]:
        found = read_assigned(self._assigned, self._namespace)
        return {path: (value, self._fingerprint(value)) for path, value in found.items()}

    def _fingerprint(self, value: Any) -> Any:
        """Return a fingerprint of what is changed in place; None for other values, which are compared by identity."""
        if not is_changed_in_place(value):
            return None
        try:
            return fingerprint_of(value, self._namespace, SharedObjects())
        except Exception:  # a value that cannot be copied does not return
            return None
