"""The local registry of runs: target, options, environment and outcome of each. Plain files, no torch."""

from accel_nb.runs.record import Run as Run
from accel_nb.runs.registry import RunRecording as RunRecording
from accel_nb.runs.registry import RunRegistry as RunRegistry
from accel_nb.runs.registry import default_folder as default_folder
