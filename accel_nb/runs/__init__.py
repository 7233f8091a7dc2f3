"""The local registry of runs: what was run with what, and how it ended. Plain files, no torch."""

from accel_nb.runs.record import Run as Run
from accel_nb.runs.registry import Recording as Recording
from accel_nb.runs.registry import Registry as Registry
from accel_nb.runs.registry import default_folder as default_folder
