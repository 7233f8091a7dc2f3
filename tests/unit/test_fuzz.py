"""Whatever arrives in place of what was meant: the documented error, in bounded time and memory, or a value of ours.

``FUZZ=10000`` makes as many changes of each sample as the nightly run does.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_nb.checkpoint import encoding
from accel_nb.checkpoint.layout import Region, covers_exactly
from accel_nb.checkpoint.manifest import (
    CheckpointOrigin,
    Manifest,
    StoredPiece,
    TensorRecord,
    make_file_record,
    read_manifest,
)
from accel_nb.config import Layer, parse_flags, read_file, resolve
from accel_nb.config.layers import Resolved
from accel_nb.errors import ConfigError, CorruptCheckpoint
from accel_nb.forecast.header import read_safetensors
from accel_nb.pool import messages
from accel_nb.pool.channel import Channel, ChannelError
from accel_nb.pool.local.shared_payloads import SharedBuffers, SharedRegion
from accel_nb.runtime.process import serialization
from accel_nb.runtime.safetensors_header import encode_header, read_header
from accel_nb.telemetry.events import (
    CheckpointSaved,
    MemorySample,
    MetricLogged,
    StepDone,
    WorkerPrepared,
    from_message,
    to_message,
)
from accel_nb.telemetry.ring import RingReader, RingWriter, create_ring, ring_bytes
from accel_nb.ui.comm import SidebarComm, SidebarState
from tests.support.mutate import HOSTILE, NUM_ROUNDS, changed_bytes, changed_value, rounds

MAX_MEMORY = 48 * 1024 * 1024
"""Samples are of some kilobytes: what a change of one may make anybody allocate."""


@contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
    finally:
        tracemalloc.stop()


def attempt(call: Callable[[], Any], *errors: type[Exception]) -> tuple[Any, str]:
    """Return what a call returns, or a short text of one of the documented errors."""
    try:
        return call(), ""
    except errors as error:
        text = str(error)
    assert text.strip()
    assert len(text) < 2000
    return None, text


# --- between kernel and workers ---

RECORDS = [
    messages.RankMessage(3, "display", {"data": {"text/plain": "1"}, "metadata": {}}),
    messages.Reply(3, "raised", {"error": {"type": "ValueError", "traceback": ["a", "b"]}}),
    messages.Exited(1, 4711, -9),
    messages.QueryLocation(7, from_outside=True),
    messages.StepCount(7, 1, 40),
    messages.TaskRequest(1, "run", {"source": "x", "used": ["a", "b"]}),
    messages.ZygoteReady(1, 1),
]


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_packets(record: Any, ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    packet = b"i" + json.dumps(messages.encode(record)).encode()
    with bounded_memory():
        for chance in rounds(1):
            theirs.send(changed_bytes(packet, chance) or b"i")
            try:
                message, descriptors = ours.receive()
                made = messages.decode(message)
            except ChannelError:
                continue
            assert descriptors == []
            assert type(made).__name__ in dir(messages)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_fields_of_messages_are_of_their_types(record: Any) -> None:
    for chance in rounds(2):
        message = changed_value(messages.encode(record), chance)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            continue  # the channel gives nothing else
        try:
            made = messages.decode(message)
        except ChannelError:
            continue
        for name, value in messages.encode(made).items():
            expected = messages.encode(record).get(name)
            if made.kind == record.kind:
                assert isinstance(value, type(expected) | int if isinstance(expected, float) else type(expected))


def test_descriptors_that_are_no_messages(ends: tuple[Channel, socket.socket], tmp_path: Path) -> None:
    """A pipe would be waited for, a folder cannot be read, a sparse file is larger than any message."""
    ours, theirs = ends
    reading, writing = os.pipe()
    large, odd = os.memfd_create("accel_nb_test"), os.memfd_create("accel_nb_test")
    os.ftruncate(large, 1 << 40)
    os.write(odd, b"\xff\xfe not json")
    folder = os.open(tmp_path, os.O_RDONLY)
    null, write_only = os.open(os.devnull, os.O_RDONLY), os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    given = [reading, writing, large, odd, folder, null, write_only]
    before = len(os.listdir("/proc/self/fd"))
    try:
        with bounded_memory():
            for descriptor in given:
                socket.send_fds(theirs, [b"s"], [descriptor])
                with pytest.raises(ChannelError):
                    ours.receive()
            socket.send_fds(theirs, [b"i{}"], given * 3)
            with pytest.raises(ChannelError):
                ours.receive()
        assert len(os.listdir("/proc/self/fd")) == before, "what came along is closed"
    finally:
        for descriptor in given:
            os.close(descriptor)


def test_a_ring_that_somebody_has_scribbled_on() -> None:
    descriptor = create_ring(8)
    writer, reader = RingWriter(descriptor), RingReader(os.dup(descriptor))
    for chance in rounds(3):
        writer.write(StepDone(0, 1, 0.0, 0.5, 0.1, 0.01, 4))
        writer.write(MemorySample(0, 1, 0.0, 1, 2, 3, 4, 5, 6))
        content = os.pread(descriptor, ring_bytes(8), 0)
        os.pwrite(descriptor, changed_bytes(content, chance)[: ring_bytes(8)], 0)
        assert all(isinstance(event, StepDone | MemorySample) for event in reader.read())
        os.pwrite(descriptor, content, 0)
    with pytest.raises(PermissionError):  # a shorter file would end the kernel, which has it mapped
        os.ftruncate(descriptor, 0)
    writer.close()
    reader.close()
    os.close(descriptor)


def test_tables_of_payloads() -> None:
    payload = SharedBuffers.write(b"stream", [memoryview(b"x" * 100), memoryview(b"y" * 9)])
    table = json.loads(json.dumps(payload.table()))
    for chance in rounds(4):
        try:
            made = SharedBuffers.from_table(payload.descriptor, changed_value(table, chance))
        except ValueError:
            continue
        stream, buffers = made.read()
        assert len(stream) == made.header_bytes
        assert [len(buffer) for buffer in buffers] == [size for _, size in made.buffers]
    payload.close()


def test_memory_that_could_shrink_is_refused() -> None:
    descriptor = os.memfd_create("accel_nb_test")
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ValueError, match="not sealed"):
        SharedBuffers.from_table(descriptor, {"header_bytes": 1, "buffers": []})
    with pytest.raises(ValueError, match="not sealed"):
        SharedRegion(descriptor)
    os.close(descriptor)


EVENTS = [
    WorkerPrepared(0, 1.0, "cpu", "ddp", "no", ("model", "optimizer"), ("batch 64 = 2 x 32",)),
    MetricLogged(1, 2, 3.0, "accuracy", 0.5),
    CheckpointSaved(0, 1, 2.0, "/runs/step_1", 0.1, 0.2, 300),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_events(event: Any) -> None:
    for chance in rounds(5):
        message = changed_value(json.loads(json.dumps(to_message(event))), chance)
        if not isinstance(message, dict):
            continue
        try:
            made = from_message(message)
        except ValueError:
            continue
        assert isinstance(made.rank, int)
        assert type(made.time) in (float, int)


def test_values_between_ranks() -> None:
    value = {"a": [1, 2.5, "x", None, (True, {3}), b"bytes"], "t": torch.arange(6.0).reshape(2, 3), 4: 1j}
    message = serialization.encode(value)
    end = 8 + int.from_bytes(message[:8], "big")
    tree = json.loads(message[8:end])
    with bounded_memory():
        for chance in rounds(6):
            for changed in (changed_bytes(message, chance), _with_tree(changed_value(tree, chance), message[end:])):
                try:
                    serialization.decode(changed)
                except ValueError:
                    continue


def _with_tree(tree: Any, buffers: bytes) -> bytes:
    text = json.dumps(tree).encode()
    return len(text).to_bytes(8, "big") + text + buffers


# --- out of files ---


def manifest() -> dict[str, Any]:
    files = {
        "state.json": make_file_record(b"{}"),
        "tensors-00000-of-00001-000.safetensors": make_file_record(b"x" * 96),
    }
    pieces = tuple(
        StoredPiece("tensors-00000-of-00001-000.safetensors", f"w{row}", Region((row, 0), (1, 3))) for row in range(4)
    )
    facts = CheckpointOrigin(
        run="r1", step=3, world_size=2, strategy="ddp", config={"seed": 1}, versions={"torch": "2"}
    )
    return json.loads(
        Manifest("abc", facts, "state.json", files, {"model/w": TensorRecord("F32", (4, 3), pieces)}).to_bytes()
    )


def signed(content: Any) -> bytes:
    """Return a manifest whose digest is right, so that what is in it is looked at."""
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name != "digest"}
        text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        content["digest"] = hashlib.blake2b(text, digest_size=16).hexdigest()
    return json.dumps(content).encode()


def test_manifests() -> None:
    sample = manifest()
    assert read_manifest(signed(sample), "here").origin.step == 3
    with bounded_memory():
        for chance in rounds(7):
            changed = sample
            for _ in range(chance.randint(1, 3)):
                changed = changed_value(changed, chance)
            made, refused = attempt(lambda content=changed: read_manifest(signed(content), "here"), CorruptCheckpoint)
            if not refused:
                assert made.state in made.files
                assert all(
                    covers_exactly([p.region for p in record.pieces], record.shape) for record in made.tensors.values()
                )


def test_manifests_cut_and_flipped() -> None:
    text = signed(manifest())
    for chance in rounds(8):
        changed = changed_bytes(text, chance)
        _, refused = attempt(lambda content=changed: read_manifest(content, "here"), CorruptCheckpoint)
        assert refused or json.loads(changed) == json.loads(text)


HEADER = encode_header({"a.weight": ("F32", (2, 3), 24), "a.bias": ("F16", (3,), 6), "n": ("I64", (), 8)})


@pytest.mark.parametrize("reads_folder", [False, True])
def test_headers_of_safetensors(tmp_path: Path, reads_folder: bool) -> None:
    length = int.from_bytes(HEADER[:8], "little")
    entries = json.loads(HEADER[8 : 8 + length])
    data = b"\1" * 38
    path = tmp_path / "model.safetensors"
    with bounded_memory():
        for chance in rounds(9, num_rounds=NUM_ROUNDS // 3 if reads_folder else NUM_ROUNDS):
            text = json.dumps(changed_value(entries, chance)).encode()
            for content in (
                changed_bytes(HEADER + data, chance),
                (len(text) + chance.choice((0, 0, 0, 1, -1, 2**62))).to_bytes(8, "little", signed=True) + text + data,
            ):
                if reads_folder:
                    path.write_bytes(content)
                    attempt(lambda: read_safetensors(path), ConfigError)
                    continue
                places, refused = attempt(
                    lambda content=content: read_header(memoryview(content), "here"), CorruptCheckpoint
                )
                assert refused or all(0 < place.start <= place.end <= len(content) for place in places.values())


def test_the_state_of_a_checkpoint() -> None:
    tree = {"step": 3, "loss": float("nan"), "shape": (1, 2), "rng": {"bytes": b"\0\1"}, 7: [1.5, None, "x"]}
    text = encoding.encode(tree).to_bytes()
    tree_ = json.loads(text)
    with bounded_memory():
        for chance in rounds(10):
            for changed in (changed_bytes(text, chance), json.dumps(changed_value(tree_, chance)).encode()):
                attempt(lambda text=changed: encoding.decode(text, lambda path: None, "here"), CorruptCheckpoint)


# --- from users ---


def test_flags() -> None:
    line = "--cpus 2 --precision bf16 --every 10min --checkpoint runs/x --show-ranks 0,1 --name 'a b' --seed 3"
    words = [*line.split(), *(str(value) for value in HOSTILE), "--no-panel", "--gpus=all", "-x", "--", "'", '"']
    for chance in rounds(11, NUM_ROUNDS // 6):
        changed = (
            changed_bytes(line.encode(), chance).decode(errors="replace")
            if chance.random() < 0.5
            else " ".join(chance.choices(words, k=chance.randint(1, 12)))
        )
        attempt(lambda line=changed: resolve([parse_flags(line, "magic")], read=_no_file), ConfigError)


def _no_file(path: str) -> Layer:
    return Layer("file", {}, path)


def test_files_of_options(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    text = (
        b"version: 1\ncpus: 2\nprecision: bf16\ncheckpoint:\n  dir: runs\n  every: 10min\nddp:\n  bucket_cap_mb: 25\n"
    )
    for chance in rounds(12, NUM_ROUNDS // 3):
        path.write_bytes(changed_bytes(text, chance))
        attempt(lambda: resolve([read_file(str(path))]), ConfigError)


def test_options_that_travel() -> None:
    document = json.loads(resolve([parse_flags("--cpus 2 --seed 3", "magic")]).to_json())
    for chance in rounds(13):
        text = json.dumps(changed_value(document, chance))
        attempt(lambda text=text: Resolved.from_json(text), ConfigError)


# --- from the browser ---


class Manager:
    """A comm manager of which a test is the browser."""

    def register_target(self, name: str, callback: Any) -> None:
        self.open = callback

    def unregister_target(self, name: str, callback: Any) -> None:
        assert callback == self.open


class Comm:
    comm_id = "1"

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def on_msg(self, callback: Any) -> None:
        self.receive = callback

    def on_close(self, callback: Any) -> None: ...

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None: ...


def test_messages_of_the_sidebar() -> None:
    class Shell:
        class kernel:
            comm_manager = Manager()

    sidebar = SidebarComm(Shell(), lambda: SidebarState([], "ready"))
    comm = Comm()
    Shell.kernel.comm_manager.open(comm, {})
    message = {"content": {"comm_id": "1", "data": {"kind": "refresh", "rank": 0, "values": {"cpus": 2}}}}
    for chance in rounds(14):
        data = changed_value(message["content"]["data"], chance)
        before = len(comm.sent)
        comm.receive({"content": {"data": data}})
        assert len(comm.sent) - before == (isinstance(data, dict) and data.get("kind") == "refresh")
    sidebar.close()
