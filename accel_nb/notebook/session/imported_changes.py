"""The attributes of imported modules and classes that the notebook's cells have set, for the workers to follow."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from IPython.core.getipython import get_ipython

from accel_nb.notebook.cells.assigned_attributes import find_assigned_attributes
from accel_nb.notebook.session.module_assignments import ModuleAssignments
from accel_nb.pool.sync.imported_attributes import (
    EXTENDED_CLASSES,
    AssignedAttribute,
    ImportedAttributes,
    ImportedPath,
    describe_copy_problem,
    read_assigned,
)
from accel_nb.pool.sync.objects.shared_ids import SharedObjects

SENT_NAME = "_accel_nb_imported"
"""The name that the attributes have in the namespaces of the notebook and the workers."""
RETURNED_NAME = "_accel_nb_returned_imports"
"""The name under which a cell returns the attributes that it has set."""


@dataclass(slots=True)
class ImportedChanges:
    """The attributes that cells may have set, found in their code, and the values that were sent last."""

    _assigned: set[AssignedAttribute] = field(default_factory=lambda: set(EXTENDED_CLASSES))
    _modules: ModuleAssignments = field(default_factory=ModuleAssignments)
    _num_read: int = 0
    """How many cells of the notebook's history have been read."""
    _sent: ImportedAttributes = field(default_factory=lambda: ImportedAttributes({}))
    _unsendable: dict[ImportedPath, Any] = field(default_factory=dict)

    def update(self, namespace: dict[str, Any], assigned: Iterable[AssignedAttribute]) -> list[str]:
        """Bind the present values to `SENT_NAME`, if there are any; return a line for each that cannot be sent.

        ``assigned`` are attributes that the cell to be run may set itself, and that later cells may read.
        """
        self._read_history()
        self._assigned |= self.in_modules()
        found = read_assigned(self._assigned, namespace)
        self._assigned |= set(assigned)
        lines: list[str] = []
        for path, value in found.items():
            if path in self._sent.values and self._sent.values[path] is value:
                continue
            if path in self._unsendable and self._unsendable[path] is value:
                continue
            problem = describe_copy_problem(value, namespace)
            if problem is None:
                self._unsendable.pop(path, None)
            else:
                self._unsendable[path] = value
                lines.append(f"left out: {path.to_text()}, as the notebook has set it: {problem}")
        values = {path: value for path, value in found.items() if path not in self._unsendable}
        sent = self._sent.values
        if values.keys() != sent.keys() or any(values[path] is not sent[path] for path in values):
            self._sent = ImportedAttributes(values)
        if values:
            namespace[SENT_NAME] = self._sent
        else:
            namespace.pop(SENT_NAME, None)
        return lines

    def ids(self) -> SharedObjects:
        """Return the ids of the objects among the values, for values that refer to them."""
        return self._sent.ids()

    def in_modules(self) -> set[AssignedAttribute]:
        """Return the global names that functions of the user's modules set, or whose objects they change."""
        return self._modules.find_in_process()

    def _read_history(self) -> None:
        """Find the attributes that cells run since the last call may set; the first call includes all earlier cells."""
        manager = getattr(get_ipython(), "history_manager", None)
        history: list[str] = [] if manager is None else manager.input_hist_parsed
        if len(history) < self._num_read:  # %reset
            self._num_read = 0
        for source in history[self._num_read :]:
            try:
                with warnings.catch_warnings():  # the cell has shown the warnings of the parser
                    warnings.simplefilter("ignore")
                    tree = ast.parse(source)
            except (SyntaxError, ValueError, RecursionError):  # a cell that has not run
                continue
            self._assigned |= find_assigned_attributes(tree)
        self._num_read = len(history)
