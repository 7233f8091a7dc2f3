"""Reports of a stall: each rank writes its own position to a file, and the launcher compares the positions.

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

from accel_nb.pool.control.hang_detection import find_different, find_missing
from accel_nb.pool.control.stack_report import position_of
from accel_nb.pool.messages import RankPosition
from accel_nb.runtime.process.typed_records import build_record
from accel_nb.runtime.world import World

SAMPLE_INTERVAL_S = 5.0
MIN_SAMPLES = 4
"""How many times in a row a rank must be at the same position before it reports it."""
_RECORD_BYTES = 4096


class StallReporter:
    """Writes the position of this process's main thread to a file, for the launcher, while the thread is stalled."""

    def __init__(self, descriptor: int, world: World) -> None:
        self._descriptor = descriptor
        self._world = world
        self._frame_key: object = None
        self._place: RankPosition | None = None
        self._count = 0

    def start(self) -> None:
        """Sample the position periodically, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="accel_nb stall reporter", daemon=True).start()

    def sample(self) -> None:
        """Sample once; cheap while the main thread makes progress."""
        main = threading.main_thread().ident
        frame = None if main is None else sys._current_frames().get(main)
        key = None if frame is None else (id(frame), frame.f_lasti)
        is_same, self._frame_key = key == self._frame_key, key
        place = self._position(main) if is_same and main is not None else None
        self._count = self._count + 1 if place is not None and place == self._place else 0
        self._place = place
        reported = place if self._count >= MIN_SAMPLES else None
        text = json.dumps(None if reported is None else asdict(reported))
        os.pwrite(self._descriptor, text.encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES), 0)

    def _position(self, main: int) -> RankPosition | None:
        if "torch.distributed" not in sys.modules:
            return None
        from accel_nb.runtime.distributed.process_group import DefaultGroup

        return position_of(main, DefaultGroup.adopt(self._world)) if DefaultGroup.is_open() else None

    def _run(self) -> None:
        never = threading.Event()
        while not never.wait(SAMPLE_INTERVAL_S):
            self.sample()


class StallComparer:
    """Reports, once for each position, which rank the others wait for, or that their collectives differ."""

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
        """Compare the positions of the ranks that run, if all of them are stalled."""
        places = {rank: place for rank in running if (place := _read_position(self._descriptors[rank])) is not None}
        if places.keys() != running:
            return
        lines = find_missing(places, set()) or find_different(places)
        for line in lines.values():
            if line not in self._reported:
                self._reported.add(line)
                self._report(
                    f"no rank makes progress: {line}. Every rank must make the same calls; Ctrl-C ends the job"
                )


def _read_position(descriptor: int) -> RankPosition | None:
    try:
        values = json.loads(os.pread(descriptor, _RECORD_BYTES, 0))
        return None if values is None else build_record(RankPosition, values)
    except ValueError:  # nothing is written yet, or a write is in progress
        return None
