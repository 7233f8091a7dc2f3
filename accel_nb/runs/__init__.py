"""The local registry of runs: what was run with what, and how it ended. Plain files, no torch."""

from accel_nb.runs.record import Run
from accel_nb.runs.registry import Recording, Registry, default_folder

__all__ = ["Recording", "Registry", "Run", "default_folder"]
