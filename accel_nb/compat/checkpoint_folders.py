"""Checkpoints that are named automatically, as accelerate names them: ``checkpoints/checkpoint_N``."""

from __future__ import annotations

import re
from pathlib import Path

from accel_nb.checkpoint.store_url import open_store
from accel_nb.compat.plugins import ProjectConfiguration

_NAME = re.compile(r"checkpoint_(\d+)")


class CheckpointFolders:
    """The folders of a project's checkpoints, by number."""

    def __init__(self, project: ProjectConfiguration) -> None:
        self._project = project

    @property
    def is_automatic(self) -> bool:
        """Whether checkpoints are named automatically."""
        return self._project.automatic_checkpoint_naming

    @property
    def _parent(self) -> Path:
        if self._project.project_dir is None:
            raise ValueError("automatic_checkpoint_naming=True needs project_dir, the folder to keep checkpoints in")
        return Path(self._project.project_dir) / "checkpoints"

    def _list_folders(self) -> list[Path]:
        entries = [] if not self._parent.is_dir() else [path for path in self._parent.iterdir() if path.is_dir()]
        numbered = [(int(match[1]), path) for path in entries if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(numbered)]

    def newest(self) -> Path:
        """Return the folder with the highest number; raises ValueError if there is none."""
        found = self._list_folders()
        if not found:
            raise ValueError(f"there is no checkpoint in {self._parent}")
        return found[-1]

    def next_folder(self) -> Path:
        """Return the folder of the next checkpoint; raises ValueError if it exists."""
        folder = self._parent / f"checkpoint_{self._project.iteration}"
        if folder.exists():
            raise ValueError(
                f"{folder} exists: another run has written it. Set ProjectConfiguration(iteration=...) to "
                "the number after it, or give another project_dir"
            )
        return folder

    def remove_oldest(self, newest: Path) -> None:
        """Remove the oldest checkpoints beyond the limit; one process calls.

        ``newest`` was saved last, whatever its number. If it is still being written in the background, it does not
        count.
        """
        if self._project.total_limit is None:
            return
        others = [folder for folder in self._list_folders() if folder.name != newest.name]
        num_kept = max(self._project.total_limit - newest.is_dir(), 0)
        store = open_store(self._parent)
        for folder in others[: max(len(others) - num_kept, 0)]:
            store.remove(folder.name)
