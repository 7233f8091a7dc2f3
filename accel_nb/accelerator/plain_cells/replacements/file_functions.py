"""Replacement of the functions for files and commands, so that all ranks together write and run each of them once."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, ExitStack

from accel_nb.accelerator.plain_cells.files.changed_paths import ChangedPaths
from accel_nb.accelerator.plain_cells.files.file_writes import PrivateFiles
from accel_nb.accelerator.plain_cells.files.library_files import LIBRARIES
from accel_nb.accelerator.plain_cells.files.replaced_file_functions import library_replacements, replacements
from accel_nb.accelerator.plain_cells.files.shared_commands import SharedCommands
from accel_nb.accelerator.plain_cells.files.shared_files import SharedFiles
from accel_nb.accelerator.plain_cells.replacements.late_imports import observed_imports
from accel_nb.accelerator.plain_cells.replacements.replaced_functions import ReplacedFunctions
from accel_nb.runtime.distributed.communicator import Communicator


class FileFunctions:
    """The files and the commands of the cells on one rank."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        private = PrivateFiles()
        self._files = SharedFiles() if comm.world.is_main else private
        self._commands = SharedCommands(comm, private)
        self._changed_paths: ChangedPaths | None = None

    def writing_for_cell(self) -> AbstractContextManager[None]:
        """Return a context in which files that this package writes are the cell's."""
        return self._files.writing_for_cell()

    def begin_cell(self, entropy: int | None) -> None:
        """Begin to record the paths that rank 0 changes; every rank must call, with the same number."""
        if self._changed_paths is None:
            self._changed_paths = ChangedPaths(self._comm)
        self._changed_paths.begin(entropy or 0)

    def replace_writes(self, stack: ExitStack, functions: ReplacedFunctions, *, is_on_some_ranks: bool) -> None:
        """Replace functions for files until the stack is closed; without regard to rank 0 in a cell of some ranks."""
        files = self._files
        stack.callback(files.discard)
        files.begin(None if is_on_some_ranks else self._changed_paths)
        functions.replace_all(replacements(files))
        replace_libraries = functools.partial(_replace_libraries, functions, files)
        stack.enter_context(observed_imports(LIBRARIES, replace_libraries))

    def replace_commands(self, stack: ExitStack, functions: ReplacedFunctions) -> None:
        """Replace functions that run commands, until the stack is closed."""
        stack.enter_context(self._commands.shared())
        functions.replace_all(self._commands.replacements())


def _replace_libraries(functions: ReplacedFunctions, files: SharedFiles | PrivateFiles) -> None:
    """Replace the functions of a library that the cell has just imported."""
    functions.replace_new(library_replacements(files))
