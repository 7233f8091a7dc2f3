"""Experiment trackers: one run for each job, called outside of the training thread."""

from accel_nb.telemetry.trackers.base import GeneralTracker, NotKept, NoTracker
from accel_nb.telemetry.trackers.pictures import pictures
from accel_nb.telemetry.trackers.selection import BUILT_IN, chosen_trackers
from accel_nb.telemetry.trackers.worker_thread import CLOSE_PATIENCE_S, TrackerFeed

__all__ = [
    "BUILT_IN",
    "CLOSE_PATIENCE_S",
    "GeneralTracker",
    "NoTracker",
    "NotKept",
    "TrackerFeed",
    "chosen_trackers",
    "pictures",
]
