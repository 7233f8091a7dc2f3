"""Reports of a stall: each rank writes its own location to a file, and the launcher compares the locations.

A script that calls a collective on rank 0 alone would otherwise block silently until the group's timeout, half
an hour later.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict

from accel_nb.pool.control.hang_detection import describe_different_collectives, describe_late_ranks
from accel_nb.pool.control.stack_report import location_of
from accel_nb.pool.messages import RankLocation
from accel_nb.runtime.process.typed_records import build_record
from accel_nb.runtime.world import World

SAMPLE_INTERVAL_S = 5.0
MIN_SAMPLES = 4
"""How many times in a row a rank must be at the same location before it reports it."""
_RECORD_BYTES = 4096


class StallReporter:
    """Writes the location of this process's main thread to a file, for the launcher, while the thread is stalled."""

    def __init__(self, descriptor: int, world: World) -> None:
        self._descriptor = descriptor
        self._world = world
        self._frame_key: object = None
        self._location: RankLocation | None = None
        self._count = 0

    def start(self) -> None:
        """Sample the location periodically, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="accel_nb stall reporter", daemon=True).start()

    def sample(self) -> None:
        """Sample once; cheap while the main thread makes progress."""
        main = threading.main_thread().ident
        frame = None if main is None else sys._current_frames().get(main)
        key = None if frame is None else (id(frame), frame.f_lasti)
        is_same, self._frame_key = key == self._frame_key, key
        location = self._read_own_location(main) if is_same and main is not None else None
        self._count = self._count + 1 if location is not None and location == self._location else 0
        self._location = location
        reported = location if self._count >= MIN_SAMPLES else None
        text = json.dumps(None if reported is None else asdict(reported))
        os.pwrite(self._descriptor, text.encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES), 0)

    def _read_own_location(self, main: int) -> RankLocation | None:
        if "torch.distributed" not in sys.modules:
            return None
        from accel_nb.runtime.distributed.process_group import DefaultGroup

        return location_of(main, DefaultGroup.adopt(self._world)) if DefaultGroup.is_open() else None

    def _run(self) -> None:
        never = threading.Event()
        while not never.wait(SAMPLE_INTERVAL_S):
            self.sample()


class StallComparer:
    """Reports, once for each location, which rank the others wait for, or that their collectives differ."""

    def __init__(self, descriptors: Mapping[int, int], report: Callable[[str], None]) -> None:
        self._descriptors = descriptors
        self._report = report
        self._due = time.monotonic() + SAMPLE_INTERVAL_S
        self._reported: set[str] = set()

    def update(self, running: Set[int]) -> None:
        """Compare, if it is due; ``running`` are the ranks that have not ended."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + SAMPLE_INTERVAL_S
            self.compare(running)

    def compare(self, running: Set[int]) -> None:
        """Compare the locations of the ranks that run, if all of them are stalled."""
        locations = {
            rank: location for rank in running if (location := _read_location(self._descriptors[rank])) is not None
        }
        if locations.keys() != running:
            return
        lines = describe_late_ranks(locations, set()) or describe_different_collectives(locations)
        for line in lines.values():
            if line not in self._reported:
                self._reported.add(line)
                self._report(
                    f"no rank makes progress: {line}. Every rank must make the same calls; Ctrl-C ends the job"
                )


def _read_location(descriptor: int) -> RankLocation | None:
    try:
        values = json.loads(os.pread(descriptor, _RECORD_BYTES, 0))
        return None if values is None else build_record(RankLocation, values)
    except ValueError:  # nothing is written yet, or a write is in progress
        return None
