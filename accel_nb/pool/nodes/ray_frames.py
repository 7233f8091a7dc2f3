"""Frames as arguments and results of calls of Ray's actors: small ones as bytes, others in Ray's object store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy

from accel_nb.pool.nodes.frames import Frame, FrameStream, join, make_frame

INLINE_BYTES = 64 * 1024
"""Ray copies values of up to 100 KiB into its messages."""


def pack(frames: Sequence[Frame]) -> Any:
    """Return frames as a value for Ray, which copies large parts once, into its object store."""
    if sum(frame.num_bytes for frame in frames) <= INLINE_BYTES:
        return join(frames)
    return [(json.dumps(frame.message), [numpy.asarray(part) for part in frame.parts]) for frame in frames]


def unpack(value: Any) -> list[Frame]:
    """Return the frames of a value; large parts are views of the object store, which cannot be written."""
    if isinstance(value, bytes):
        return FrameStream().feed(value)
    return [make_frame(json.loads(message), map(memoryview, arrays)) for message, arrays in value]
