"""Experiment trackers: one run for each job, called outside of the training thread."""

from accel_nb.telemetry.trackers.base import GeneralTracker as GeneralTracker
from accel_nb.telemetry.trackers.base import NoTracker as NoTracker
from accel_nb.telemetry.trackers.base import UnsupportedByTracker as UnsupportedByTracker
from accel_nb.telemetry.trackers.pictures import pictures as pictures
from accel_nb.telemetry.trackers.selection import BUILT_IN as BUILT_IN
from accel_nb.telemetry.trackers.selection import build_trackers as build_trackers
from accel_nb.telemetry.trackers.worker_thread import CLOSE_TIMEOUT_S as CLOSE_TIMEOUT_S
from accel_nb.telemetry.trackers.worker_thread import TrackerThread as TrackerThread
