"""Where logged values go beside the panel: experiment trackers, one run a job, written off the training thread."""

from accel_nb.telemetry.trackers.base import GeneralTracker, NotKept, NoTracker
from accel_nb.telemetry.trackers.choose import BUILT_IN, chosen_trackers
from accel_nb.telemetry.trackers.feed import CLOSE_PATIENCE_S, TrackerFeed
from accel_nb.telemetry.trackers.pictures import pictures

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
