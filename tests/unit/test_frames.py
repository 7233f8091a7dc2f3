"""Frames between kernel and nodes, and the store of a process group."""

from __future__ import annotations

from typing import Any

import pytest

from accel_nb.pool.channel import ChannelError
from accel_nb.pool.nodes.frames import FrameStream, build_payloads, describe_payloads, join, make_frame
from accel_nb.pool.nodes.group_store import GroupStore
from accel_nb.pool.nodes.ray_frames import INLINE_BYTES, pack, unpack
from accel_nb.pool.payload import BufferPayload, MemoryBuffers, MemoryRegion, RegionPayload


def test_frames_come_back_from_a_stream_in_pieces():
    sent = [make_frame({"kind": "a"}, [b"", b"xyz", memoryview(bytearray(1000))]), make_frame({"kind": "b", "n": 1})]
    data, stream = join(sent), FrameStream()
    for size in (1, 7, len(data)):
        pieces = [stream.feed(data[start : start + size]) for start in range(0, len(data), size)]
        assert [frame for piece in pieces for frame in piece] == sent
        assert sum(map(bool, pieces)) == (2 if size < len(data) else 1), "a frame is returned when it is whole"


@pytest.mark.parametrize(
    "change", [lambda data: b"\0" * 7 + b"\1" + data[8:], lambda data: data.replace(b"[3]", b"[2]")]
)
def test_a_frame_whose_lengths_do_not_fit_is_refused(change: Any):
    with pytest.raises(ChannelError):
        FrameStream().feed(change(join([make_frame({"kind": "a"}, [b"xyz"])])))


@pytest.mark.parametrize("size", [0, 5, 3 * INLINE_BYTES])
def test_frames_come_back_from_values_for_ray(size: int):
    sent = [make_frame({"kind": "a"}, [bytes(size), b""]), make_frame({"kind": "b"})]
    assert unpack(pack(sent)) == sent


def test_payloads_come_back_with_memory_of_their_own():
    given = {
        "values": MemoryBuffers(b"head", [memoryview(b"xy"), memoryview(b"")]),
        "weights": MemoryRegion(bytearray(9), used_bytes=5),
    }
    tables, parts = describe_payloads(given)
    built = build_payloads(tables, [memoryview(part) for part in parts])
    values, weights = built["values"], built["weights"]
    assert isinstance(values, BufferPayload)
    assert isinstance(weights, RegionPayload)
    header, buffers = values.read()
    buffers[0][0] = 65
    assert (header, [bytes(buffer) for buffer in buffers], weights.num_bytes) == (b"head", [b"Ay", b""], 5)


def test_the_store_answers_a_call_when_its_keys_are_set():
    store, answers = GroupStore(), list[Any]()

    def call(name: str, *keys: str, **values: Any) -> list[Any]:
        answers.clear()
        store.call(name, list(keys), values, answers.append)
        return list(answers)

    waiting = list[Any]()
    store.call("get", ["a"], {}, waiting.append)
    store.call("wait", ["a", "b"], {}, waiting.append)
    assert call("set", "a", value="1") == [None]
    assert waiting == ["1"]
    assert call("set", "b", value="2") == [None]
    assert waiting == ["1", None]
    assert call("add", "n", amount=2) == [2]
    assert call("add", "n", amount=3) == [5]
    assert call("append", "b", value="3") == [None]
    assert call("get", "b") == ["23"]
    assert call("compare_set", "c", expected="", value="x") == ["x"]
    assert call("compare_set", "c", expected="y", value="z") == ["x"]
    assert call("check", "a", "absent") == [False]
    assert call("delete", "a") == [True]
    assert call("count") == [3]
