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


class StoredPayloads:
    """Payloads in Ray's object store that nodes have not yet received: one copy, however many nodes receive it."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._references: dict[int, Any] = {}

    def put(self, frame: Frame) -> Any:
        """Return a reference to the frame of a payload, which is put into the store if it is not there."""
        number = frame.message["number"]
        if (reference := self._references.get(number)) is None:
            reference = self._references[number] = self._ray.put(pack([frame]))
        return reference

    def forget(self, frame: Frame) -> None:
        """Drop the reference to a frame that a node has received; Ray keeps it for calls that are under way."""
        self._references.pop(frame.message["number"], None)


def unpack(value: Any) -> list[Frame]:
    """Return the frames of a value; large parts are views of the object store, which cannot be written."""
    if isinstance(value, bytes):
        return FrameStream().feed(value)
    return [make_frame(json.loads(message), map(memoryview, arrays)) for message, arrays in value]
