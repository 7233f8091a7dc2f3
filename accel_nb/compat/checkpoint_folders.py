"""Checkpoints that are named automatically, as accelerate names them: ``checkpoints/checkpoint_N``."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from accel_nb.accelerator.state.training_state import TrainingState
from accel_nb.checkpoint.discovery import is_complete
from accel_nb.checkpoint.store import Store
from accel_nb.checkpoint.store_url import open_store
from accel_nb.compat.plugins import ProjectConfiguration

_NAME = re.compile(r"checkpoint_(\d+)")


class CheckpointFolders:
    """The folders of a project's checkpoints, by number; the project is a folder or a URL."""

    def __init__(self, project: ProjectConfiguration) -> None:
        self._project = project

    @property
    def is_automatic(self) -> bool:
        """Whether checkpoints are named automatically."""
        return self._project.automatic_checkpoint_naming

    def _open(self) -> Store:
        if self._project.project_dir is None:
            raise ValueError("automatic_checkpoint_naming=True needs project_dir, the folder to keep checkpoints in")
        return open_store(os.path.join(self._project.project_dir, "checkpoints"))

    def newest(self) -> str:
        """Return the folder with the highest number; raises ValueError if there is none."""
        store = self._open()
        found = _list_names(store)
        if not found:
            raise ValueError(f"there is no checkpoint in {store.url}")
        return f"{store.url}/{found[-1]}"

    def next_folder(self) -> str:
        """Return the folder of the next checkpoint; raises ValueError if it exists."""
        store = self._open()
        name = f"checkpoint_{self._project.iteration}"
        if name in store.folders():
            raise ValueError(
                f"{store.url}/{name} exists: another run has written it. Set ProjectConfiguration(iteration=...) to "
                "the number after it, or give another project_dir"
            )
        return f"{store.url}/{name}"

    def remove_oldest(self, newest: str) -> None:
        """Remove the oldest checkpoints beyond the limit; one process calls.

        ``newest`` is the folder that was saved last, whatever its number. If it is still being written in the
        background, it does not count.
        """
        if self._project.total_limit is None:
            return
        store, name = self._open(), newest.rpartition("/")[2]
        others = [other for other in _list_names(store) if other != name]
        num_kept = max(self._project.total_limit - is_complete(store, name), 0)
        for other in others[: max(len(others) - num_kept, 0)]:
            store.remove(other)


def call_hooks_apart(state: TrainingState, rank: int) -> None:
    """Call the hooks of a save on a rank that does not write the checkpoint, with a folder that is not kept.

    Hooks may call collectives, which every rank has to call. A warning names the files that they write.
    """
    with TemporaryDirectory() as folder:
        state.call_save_hooks(folder)
        written = sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    if written:
        warnings.warn(
            f"save_state: files that hooks write on rank {rank} are not in the checkpoint, which has those of rank 0: "
            f"{', '.join(written)}. Collect what they contain with gather_object, and write it on rank 0",
            stacklevel=3,
        )


def _list_names(store: Store) -> list[str]:
    numbered = [(int(match[1]), name) for name in store.folders() if (match := _NAME.fullmatch(name))]
    return [name for _, name in sorted(numbered)]
