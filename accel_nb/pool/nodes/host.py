"""The host of a node: runs a local engine and exchanges frames with the kernel; independent of the transport.

The local engine starts worker processes and exchanges records with them. Frames from the kernel:

- ``start`` and ``replace`` start workers; their ``epoch`` is the number of the process group that is opened next.
- ``send`` is a record for a rank, and ``payload`` the bytes of payloads of records; ``drop`` frees a payload.
- ``store`` is the answer to a call of the store of the process group.
- ``readable`` and ``opened`` state that the kernel can read, and has opened, files of shared memory.
- ``kill`` ends a rank, ``stop`` the host, and ``beat`` is a heartbeat.

Frames to the kernel:

- ``record``, ``output`` and ``events`` are what a rank has sent; ``ended`` reports the end of its process.
- ``observed`` is the state of a rank, and ``stack`` the Python stack that it writes afterwards.
- ``call`` is a call of the store, by a rank.
- ``facts`` are the processes of the node and their memory; ``offer`` names a file by which the kernel finds out whether
  it can read the files of this machine.
- ``failed`` is an error of a start, and ``beat`` a heartbeat.

Each of these has as its ``generation`` the ``epoch`` of the start that it belongs to.
"""

from __future__ import annotations

import json
import queue
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from accel_nb.errors import PoolError
from accel_nb.pool.channel import Message
from accel_nb.pool.engine import (
    Arrival,
    EventsArrived,
    ObservedState,
    OutputArrived,
    RecordArrived,
    WorkerEnded,
    WorkerSpec,
)
from accel_nb.pool.local.engine import LocalEngine, NodeSettings
from accel_nb.pool.local.shared_payloads import SharedBuffers, StoreFile
from accel_nb.pool.messages import decode, encode
from accel_nb.pool.nodes.frames import Frame, Part, describe_payloads, make_frame
from accel_nb.pool.nodes.machine_facts import pack_machine
from accel_nb.pool.nodes.opened_files import OfferedFiles
from accel_nb.pool.payload import NO_PAYLOADS, Payload, Payloads, close_all
from accel_nb.runtime.process.environment import get_variable
from accel_nb.runtime.process.hardware import inspect_machine
from accel_nb.runtime.process.loopback import find_loopback
from accel_nb.telemetry.events import to_message

MAX_PACKET = 1024 * 1024
BUSY_POLL_S = 0.05
"""How often measurements are read while nothing else arrives."""
IDLE_POLL_S = 0.5
MAX_BATCH_BYTES = 1024 * 1024
"""Frames are returned together until their total size in bytes reaches this."""
FACTS_INTERVAL_S = 2.0
"""How often the memory of the workers is measured."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The settings with which a host is started."""

    program: str
    """The program of the workers, as ``module:attribute``."""
    preload: tuple[str, ...]
    """Modules that are loaded before workers are forked."""
    node: int
    address: str
    """The address of node 0."""
    own_address: str
    lease_s: float
    """The host ends its workers when it has received nothing from the kernel for this time."""
    overrides: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers."""
    is_local: bool = False
    """Whether the host is on the kernel's machine."""


def interface_of(address: str) -> str:
    """Return the network interface of an address of this machine; empty if none has it."""
    if address.startswith("127."):
        return find_loopback()
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return ""


class SocketStores:
    """The connections of a node's ranks to the store of a process group, which is in the kernel."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._sockets: dict[int, socket.socket] = {}

    def renew(self) -> None:
        """Close the connections of the previous group, so that its ranks cannot find ranks of the next one."""
        self.close()

    def connect(self, rank: int) -> int:
        """Return the rank's end of a new connection, as a file descriptor."""
        self._sockets[rank], rank_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._selector.register(self._sockets[rank], selectors.EVENT_READ, rank)
        return rank_end.detach()

    def payloads(self) -> Payloads:
        """Return no payloads: each rank gets a connection of its own with the request to open the group."""
        return NO_PAYLOADS

    def read(self, rank: int) -> Message | None:
        """Return the next call of a rank; None if the rank has closed its connection."""
        try:
            call = json.loads(self._sockets[rank].recv(MAX_PACKET) or "null")
        except (OSError, ValueError):
            call = None
        if call is None:
            self.remove(rank)
        return call

    def answer(self, rank: int, message: Message) -> None:
        """Send the answer of a call to a rank, if it is still connected."""
        if rank in self._sockets:
            with suppress(OSError):
                self._sockets[rank].send(json.dumps(message).encode())

    def remove(self, rank: int) -> None:
        """Close the connection of a rank."""
        if (connection := self._sockets.pop(rank, None)) is not None:
            self._selector.unregister(connection)
            connection.close()

    def close(self) -> None:
        """Close all connections."""
        for rank in list(self._sockets):
            self.remove(rank)


class NodeHost:
    """Owns the local engine of a node in one thread; `receive` and `take` may be called in any other."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._inbox: deque[Frame] = deque()
        self._outbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake, self._wake_end = socket.socketpair()
        self._wake_end.setblocking(False)
        self._stores = SocketStores(self._selector)
        self._stored: dict[int, SharedBuffers] = {}
        self._offered = OfferedFiles()
        self._awaited_stacks: dict[int, ObservedState] = {}
        # The numbers of the process group, and of the first group since the last start.
        self._generation = self._epoch = 0
        self._facts: Message = {}
        self._measured_at = 0.0
        self._last_frame_at = time.monotonic()
        self._is_stopping = False
        if settings.is_local:
            self._send(self._offered.offer())
        self._thread = threading.Thread(target=self._run, name="accel_nb host", daemon=True)
        self._thread.start()

    def receive(self, frames: Sequence[Frame]) -> None:
        """Accept frames from the kernel; no frame, or a heartbeat, only renews the lease."""
        self._last_frame_at = time.monotonic()
        others = [frame for frame in frames if frame.message["kind"] != "beat"]
        if others:
            self._inbox.extend(others)
            with suppress(BlockingIOError, OSError):
                self._wake_end.send(b"x")

    def take(self, timeout_s: float) -> list[Frame] | None:
        """Return frames for the kernel; empty if there are none in this time, None after the end of the host."""
        frames: list[Frame] = []
        with suppress(queue.Empty):
            while sum(frame.num_bytes for frame in frames) < MAX_BATCH_BYTES:
                frame = self._outbox.get_nowait() if frames else self._outbox.get(timeout=timeout_s)
                if frame is None:
                    self._outbox.put(None)
                    return frames or None
                frames.append(frame)
        return frames

    def wait(self, timeout_s: float) -> None:
        """Wait until the host has ended, but at most this time."""
        self._thread.join(timeout_s)

    def stop(self) -> None:
        """End the workers and the thread; a second call does nothing."""
        self._is_stopping = True
        with suppress(OSError):
            self._wake_end.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        settings = self._settings
        engine = LocalEngine(
            settings.program,
            preload=settings.preload,
            overrides=settings.overrides,
            node=NodeSettings(settings.node, settings.address, interface_of(settings.own_address)),
            stores=self._stores,
        )
        try:
            self._selector.register(engine.fileno(), selectors.EVENT_READ, None)
            self._selector.register(self._wake, selectors.EVENT_READ, None)
            while not self._is_stopping:
                ready = self._selector.select(BUSY_POLL_S if engine.pids else IDLE_POLL_S)
                for key, _ in ready:
                    if isinstance(key.data, int):
                        if (call := self._stores.read(key.data)) is not None:
                            self._send({"kind": "call", "epoch": self._epoch, "rank": key.data, "call": call})
                    elif key.fileobj is self._wake:
                        self._wake.recv(4096)
                while self._inbox and not self._is_stopping:
                    frame = self._inbox.popleft()
                    self._handle(engine, frame.message, frame.parts)
                for arrival in engine.poll(0):
                    self._report(arrival)
                self._report_stacks()
                self._report_facts(engine)
                if time.monotonic() - self._last_frame_at > settings.lease_s:
                    break  # the kernel has ended, or has declared this node lost
        finally:
            engine.stop()
            close_all(self._stored.values())
            self._offered.close()
            self._selector.close()
            self._wake.close()
            self._wake_end.close()
            self._outbox.put(None)

    def _handle(self, engine: LocalEngine, message: Message, parts: Sequence[memoryview]) -> None:
        kind = message["kind"]
        if kind == "send":
            self._send_to_rank(engine, message)
        elif kind == "payload":
            self._stored[message["number"]] = SharedBuffers.write(bytes(parts[0]), parts[1:])
        elif kind == "drop":
            if (stored := self._stored.pop(message["number"], None)) is not None:
                stored.close()
        elif kind == "readable":
            self._offered.are_readable = True
        elif kind == "opened":
            self._offered.drop(message["numbers"])
        elif kind == "store":
            if message["epoch"] == self._epoch:
                self._stores.answer(message["rank"], message["answer"])
        elif kind == "kill":
            with suppress(PoolError):  # the zygote has ended, and with it the rank
                engine.kill(message["rank"])
        elif kind == "stop":
            self._is_stopping = True
        elif kind in ("start", "replace"):
            self._epoch = message["epoch"]
            try:
                if kind == "start":
                    self._generation, self._awaited_stacks = message["epoch"], {}
                    engine.start([WorkerSpec(*spec) for spec in message["specs"]])
                else:
                    engine.replace(message["ranks"])
            except PoolError as error:
                self._send({"kind": "failed", "text": str(error)})

    def _send_to_rank(self, engine: LocalEngine, message: Message) -> None:
        rank, record = message["rank"], decode(message["record"])
        payloads: dict[str, Payload] = {}
        own: list[Payload] = []
        for name, table in message["payloads"].items():
            if table["kind"] == "epoch":
                if table["number"] != self._epoch:
                    return  # a later group is being opened
                self._stores.remove(rank)
                payloads[name] = StoreFile(self._stores.connect(rank))
                own.append(payloads[name])
            else:
                payloads[name] = self._stored[table["number"]]
        try:
            engine.send(rank, record, payloads, urgent=message["urgent"])
        finally:
            close_all(own)

    def _report(self, arrival: Arrival) -> None:
        if isinstance(arrival, RecordArrived):
            files, others = self._offered.share(arrival.payloads)
            tables, parts = describe_payloads(others)
            message = {"kind": "record", "rank": arrival.rank, "record": encode(arrival.record), "payloads": tables}
            self._send({**message, "files": files}, parts)
            close_all(others.values())
        elif isinstance(arrival, OutputArrived):
            self._send({"kind": "output", "rank": arrival.rank, "stream": arrival.stream}, [arrival.data])
        elif isinstance(arrival, EventsArrived):
            events = [to_message(event) for event in arrival.events]
            self._send({"kind": "events", "rank": arrival.rank, "events": events})
        elif isinstance(arrival, WorkerEnded):
            self._stores.remove(arrival.rank)
            self._send(
                {
                    "kind": "ended",
                    "rank": arrival.rank,
                    "code": arrival.code,
                    "reason": arrival.reason,
                    "stack": arrival.stack,
                    "killed_for": arrival.killed_for,
                }
            )
        elif isinstance(arrival, ObservedState):
            self._awaited_stacks[arrival.rank] = arrival
            self._send({"kind": "observed", "rank": arrival.rank, "state": arrival.state, "text": arrival.read_stack()})

    def _report_stacks(self) -> None:
        """Send the Python stacks that ranks have written after they were observed: a busy rank is late."""
        for rank, observed in list(self._awaited_stacks.items()):
            try:
                text = observed.read_stack()
            except OSError:  # the rank has ended
                del self._awaited_stacks[rank]
                continue
            if text:
                del self._awaited_stacks[rank]
                self._send({"kind": "stack", "rank": rank, "text": text})

    def _report_facts(self, engine: LocalEngine) -> None:
        now = engine.facts()
        facts = {
            "kind": "facts",
            "is_warm": now.is_warm,
            "num_threads": now.num_threads,
            "pids": {str(rank): pid for rank, pid in now.pids.items()},
        }
        if facts == self._facts and time.monotonic() - self._measured_at < FACTS_INTERVAL_S:
            return
        self._facts, self._measured_at = facts, time.monotonic()
        sizes = {str(rank): _resident_bytes(pid) for rank, pid in now.pids.items()}
        self._send({**facts, "resident_bytes": sizes, "machine": pack_machine(inspect_machine())})

    def _send(self, message: Message, parts: Sequence[Part] = ()) -> None:
        self._outbox.put(make_frame({**message, "generation": self._generation}, parts))


def _resident_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def read_settings(values: dict[str, Any]) -> HostSettings:
    """Return the settings of a message."""
    return HostSettings(**{**values, "preload": tuple(values["preload"])})


def with_hash_seed(overrides: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for the workers, with one hash seed, so that sets of text have the same order."""
    own = get_variable("PYTHONHASHSEED", "random")
    seed = str(secrets.randbelow(2**32)) if own == "random" else own
    return {"PYTHONHASHSEED": seed, **overrides}


def describe_differences(name: str, found: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Return the versions of a node that differ from this machine's, and the remedy; empty if there are none."""
    differing = [f"{what} {found[what]} instead of {own[what]}" for what in own if found[what] != own[what]]
    if not differing:
        return ""
    wanted = " ".join(f"{what}=={own[what]}" for what in own if what != "Python" and found[what] != own[what])
    remedy = f"on the node: pip install {wanted}" if wanted else f"install Python {own['Python']} on it"
    return f"node {name} has {', '.join(differing)}; {remedy}"


def own_versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes; nothing is imported for it."""
    from importlib.metadata import PackageNotFoundError, version
    from platform import python_version_tuple

    found = {"Python": ".".join(python_version_tuple()[:2])}
    for package in ("torch", "accel_nb", "cloudpickle"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
