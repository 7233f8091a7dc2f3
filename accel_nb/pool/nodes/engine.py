"""The engine for several nodes, in the kernel: one host on each node runs the local engine for the node's ranks."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from accel_nb.errors import PoolError
from accel_nb.pool.channel import Message
from accel_nb.pool.engine import (
    Arrival,
    EngineFacts,
    EventsArrived,
    NodeLost,
    ObservedState,
    OutputArrived,
    RecordArrived,
    WorkerEnded,
    WorkerSpec,
    ranks_of_node,
)
from accel_nb.pool.messages import decode, encode
from accel_nb.pool.nodes.frames import HEARTBEAT_S, Frame, GroupEpoch, Part, build_payloads, make_frame
from accel_nb.pool.nodes.group_store import GroupStore
from accel_nb.pool.nodes.machine_facts import read_machine
from accel_nb.pool.nodes.opened_files import can_open, open_payloads
from accel_nb.pool.payload import (
    NO_PAYLOADS,
    BufferPayload,
    MemoryBuffers,
    MemoryRegion,
    Payloads,
    close_all,
)
from accel_nb.runtime.process.environment import GPU_VARIABLE, get_variable, inherited_variables
from accel_nb.telemetry.events import from_message

CHECK_S = 0.05
STOP_TIMEOUT_S = 5.0
RECEIVED_BYTES_PER_S = 200e6
"""A node is expected to receive large data at least this fast; until then it may answer late."""


class HostLink(Protocol):
    """The connection to the host of one node, over which frames arrive in order."""

    name: str
    """The name or address of the node, for messages."""

    def send(self, frames: Sequence[Frame]) -> None:
        """Send frames, whose memory may change afterwards; frames to a host that has ended are dropped."""
        ...

    def beat(self) -> None:
        """Send a heartbeat to the host; frames that are under way must not delay it."""
        ...

    def unreceived_bytes(self) -> int:
        """Return the size of the large data under way to the host, during which its heartbeats may be late."""
        ...

    def receive(self) -> list[Frame] | None:
        """Wait for frames; return them, nothing for a heartbeat or a part of a frame, None after the host's end."""
        ...

    def close(self) -> None:
        """End the host's process at once, if it still runs; a second call does nothing."""
        ...

    def release(self) -> None:
        """Free what `receive` has used; called when no thread is in it."""
        ...


class NodePayload(BufferPayload):
    """A header and buffers that are sent to each node once, however many ranks receive them."""

    def __init__(
        self, number: int, header: bytes, buffers: Sequence[memoryview], drop: Callable[[NodePayload], None]
    ) -> None:
        self.number = number
        self.nodes: set[int] = set()
        """The nodes that have the bytes."""
        self._content = MemoryBuffers(header, buffers)
        self._parts: list[Part] = [header, *buffers]
        self._drop = drop

    @property
    def parts(self) -> list[Part]:
        """The header and the buffers."""
        return self._parts

    def read(self) -> tuple[bytes, list[memoryview]]:
        """Return the header and copies of the buffers."""
        return self._content.read()

    def close(self) -> None:
        """Drop the buffers, here and on the nodes."""
        self._content.close()
        self._parts = []
        self._drop(self)


@dataclass(slots=True)
class _Node:
    """The kernel's record of one node."""

    number: int
    link: HostLink
    last_seen: float
    facts: Message = field(default_factory=dict)
    lost: str = ""
    """Why the node was lost; empty while it is connected."""
    reader: threading.Thread | None = None
    delayed: deque[Frame] = field(default_factory=deque)
    """Frames that are sent with the next one, or within `CHECK_S`."""


class NodePayloads:
    """The factory of payloads for nodes; ``drop`` is called with each payload that is closed."""

    def __init__(self, drop: Callable[[NodePayload], None]) -> None:
        self._drop = drop
        self._numbers = itertools.count(1)

    def write(self, header: bytes, buffers: Sequence[memoryview]) -> NodePayload:
        """Return a payload that refers to the buffers."""
        return NodePayload(next(self._numbers), header, buffers, self._drop)

    def reserve(self, num_bytes: int) -> MemoryRegion:
        """Return a region of at least one byte."""
        return MemoryRegion(bytearray(max(num_bytes, 1)))


class NodesEngine:
    """Runs workers on nodes; `HostLink` sends the frames. A node that does not answer in time is lost permanently."""

    def __init__(
        self, links: Sequence[HostLink], *, lost_after_s: float, on_stop: Callable[[], None] = lambda: None
    ) -> None:
        self.payloads = NodePayloads(self._drop)
        self._lost_after_s = lost_after_s
        self._on_stop = on_stop
        # The time in which this process could not read what nodes send, such as while the machine was suspended.
        self._paused_s = 0.0
        now = self._clock()
        self._nodes = [_Node(number, link, now) for number, link in enumerate(links)]
        # The choice of GPUs is made on each node.
        self._variables = {name: value for name, value in inherited_variables().items() if name != GPU_VARIABLE}
        if (gpus := get_variable(GPU_VARIABLE, None)) is not None:
            self._variables[GPU_VARIABLE] = gpus
        self._specs: list[WorkerSpec] = []
        self._generation = self._epoch = 0
        self._store = GroupStore()
        self._ended: set[int] = set()
        self._stacks: dict[int, str] = {}
        self._arrivals: queue.SimpleQueue[tuple[int, Arrival | PoolError]] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        for node in self._nodes:
            node.reader = threading.Thread(target=self._read, args=(node,), name="accel_nb node", daemon=True)
            node.reader.start()
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="accel_nb heartbeats", daemon=True)
        self._heartbeats.start()

    def facts(self) -> EngineFacts:
        """Return the latest known state of all nodes."""
        nodes = self._nodes
        live = [node for node in nodes if not node.lost]
        return EngineFacts(
            is_warm=all(node.facts.get("is_warm", False) for node in live),
            num_threads=max((node.facts.get("num_threads", 1) for node in live), default=1),
            variables=self._variables,
            pids=_by_rank(live, "pids"),
            zygote_pid=None,
            nodes=tuple(node.link.name for node in nodes),
            lost_nodes={node.number: node.lost for node in nodes if node.lost},
            resident_bytes=_by_rank(live, "resident_bytes"),
            machines={node.number: read_machine(node.facts["machine"]) for node in live if "machine" in node.facts},
        )

    def refresh(self) -> None:
        """Do nothing: threads read what nodes report."""

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Start one worker for each spec on its node, in place of those that run."""
        with self._lock:
            self._require(specs)
            self._specs, self._ended, self._stacks = list(specs), set(), {}
            self._open_epoch()
            self._generation = self._epoch
            rows = [[spec.device, spec.num_threads, spec.node] for spec in specs]
            for node in self._live():
                node.facts.pop("pids", None)
                self._send(node, make_frame({"kind": "start", "epoch": self._epoch, "specs": rows}))

    def send(self, rank: int, record: object, payloads: Payloads = NO_PAYLOADS, *, urgent: bool = False) -> bool:
        """Send a record to a rank; return False if the rank has ended or its node is lost."""
        node = self._nodes[self._specs[rank].node]
        if node.lost or rank in self._ended:
            return False
        tables: dict[str, Any] = {}
        frames: list[Frame] = []
        for name, payload in payloads.items():
            if isinstance(payload, GroupEpoch):
                tables[name] = {"kind": "epoch", "number": payload.number}
            elif isinstance(payload, NodePayload):
                if node.number not in payload.nodes:
                    payload.nodes.add(node.number)
                    frames.append(make_frame({"kind": "payload", "number": payload.number}, payload.parts))
                tables[name] = {"kind": "stored", "number": payload.number}
            else:
                raise TypeError(f"the payload {name!r} is a {type(payload).__name__}, which cannot be sent to a node")
        message = {"kind": "send", "rank": rank, "record": encode(record), "payloads": tables, "urgent": urgent}
        self._send(node, *frames, make_frame(message))
        return True

    def poll(self, timeout_s: float) -> list[Arrival]:
        """Return the records, output and events that have arrived; raise PoolError if workers could not be started."""
        arrivals: list[Arrival] = []
        with suppress(queue.Empty):
            wait = timeout_s > 0
            while True:
                generation, arrival = self._arrivals.get(block=wait, timeout=timeout_s if wait else None)
                if generation != self._generation:
                    if isinstance(arrival, RecordArrived):
                        close_all(arrival.payloads.values())
                    continue
                wait = False
                if isinstance(arrival, PoolError):
                    raise arrival
                arrivals.append(arrival)
        return arrivals

    def kill(self, rank: int) -> None:
        """Kill a rank."""
        self._send(self._nodes[self._specs[rank].node], make_frame({"kind": "kill", "rank": rank}))

    def replace(self, ranks: Sequence[int]) -> Payloads:
        """Start fresh workers in place of ended ones; return the number of the new process group as a payload."""
        with self._lock:
            self._require(self._specs)
            self._ended.difference_update(ranks)
            self._open_epoch()
            for node in self._live():
                own = [rank for rank in ranks if self._specs[rank].node == node.number]
                self._send(node, make_frame({"kind": "replace", "epoch": self._epoch, "ranks": own}))
            return {"store": GroupEpoch(self._epoch)}

    def stop(self) -> None:
        """End all hosts and their workers; a second call does nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        for node in self._live():
            self._send(node, make_frame({"kind": "stop"}))
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for node in self._live():
            assert node.reader is not None
            node.reader.join(max(0.0, deadline - time.monotonic()))
        for node in self._nodes:
            assert node.reader is not None
            node.link.close()
            node.reader.join(STOP_TIMEOUT_S)
            node.link.release()
        self._heartbeats.join()
        self._on_stop()

    def _open_epoch(self) -> None:
        self._epoch += 1
        self._store = GroupStore()

    def _require(self, specs: Sequence[WorkerSpec]) -> None:
        for spec in specs:
            if reason := self._nodes[spec.node].lost:
                raise PoolError(reason)

    def _live(self) -> list[_Node]:
        return [node for node in self._nodes if not node.lost]

    def _drop(self, payload: NodePayload) -> None:
        for number in payload.nodes:
            self._nodes[number].delayed.append(make_frame({"kind": "drop", "number": payload.number}))

    def _send(self, node: _Node, *frames: Frame) -> None:
        """Send frames to a node, after those that were delayed."""
        delayed: list[Frame] = []
        with suppress(IndexError):
            while True:
                delayed.append(node.delayed.popleft())
        if not node.lost and (delayed or frames):
            node.link.send([*delayed, *frames])

    def _read(self, node: _Node) -> None:
        """Handle the frames of a node until its host ends or it is lost."""
        while not node.lost and (frames := node.link.receive()) is not None:
            node.last_seen = self._clock()
            for frame in frames:
                if not node.lost:
                    self._handle(node, frame.message, frame.parts)
        if not self._stopping.is_set():
            self._record_loss(node, f"node {node.link.name} was lost: the process that starts its workers has ended")

    def _handle(self, node: _Node, message: Message, parts: Sequence[memoryview]) -> None:
        kind, rank = message["kind"], message.get("rank", 0)
        arrival: Arrival | PoolError | None = None
        if kind == "record":
            arrival = self._receive_record(node, message, parts)
        elif kind == "output":
            arrival = OutputArrived(rank, message["stream"], bytes(parts[0]))
        elif kind == "events":
            arrival = EventsArrived(rank, tuple(from_message(event) for event in message["events"]))
        elif kind == "ended":
            self._ended.add(rank)
            stack = message["stack"] or self._stacks.pop(rank, "")
            arrival = WorkerEnded(rank, message["code"], message["reason"], stack, message["killed_for"])
        elif kind == "observed":
            self._stacks[rank] = message["text"]
            arrival = ObservedState(rank, message["state"], lambda: self._stacks.pop(rank, ""))
        elif kind == "stack":
            self._stacks[rank] = self._stacks.get(rank, "") + message["text"]
        elif kind == "facts":
            if message["generation"] == self._generation:
                node.facts = message
        elif kind == "call":
            self._answer_call(node, message)
        elif kind == "offer":
            if can_open(message):
                self._send(node, make_frame({"kind": "readable"}))
        elif kind == "failed":
            arrival = PoolError(f"node {node.link.name}: {message['text']}")
        if arrival is not None:
            self._arrivals.put((message["generation"], arrival))

    def _receive_record(self, node: _Node, message: Message, parts: Sequence[memoryview]) -> RecordArrived | PoolError:
        files: dict[str, Any] = message["files"]
        try:
            payloads = open_payloads(files)
        except (OSError, ValueError) as error:  # an OSError if the host has ended since, which its link reports
            return PoolError(f"node {node.link.name}: the memory of results could not be opened: {error}")
        if files:
            numbers = [entry["number"] for entry in files.values()]
            node.delayed.append(make_frame({"kind": "opened", "numbers": numbers}))
        payloads |= build_payloads(message["payloads"], parts)
        return RecordArrived(message["rank"], decode(message["record"]), payloads)

    def _answer_call(self, node: _Node, message: Message) -> None:
        epoch, rank, call = message["epoch"], message["rank"], message["call"]

        def answer(value: Any) -> None:
            reply = {"number": call["number"], "value": value}
            self._send(node, make_frame({"kind": "store", "epoch": epoch, "rank": rank, "answer": reply}))

        with self._lock:
            if epoch == self._epoch:
                self._store.call(call["name"], call["keys"], call, answer)

    def _send_heartbeats(self) -> None:
        sent_at, checked_at = 0.0, time.monotonic()
        while not self._stopping.wait(CHECK_S):
            now = time.monotonic()
            if (late_s := now - checked_at - CHECK_S) > CHECK_S:
                self._paused_s += late_s
            checked_at = now
            if now - sent_at >= HEARTBEAT_S:
                sent_at = now
                for node in self._live():
                    node.link.beat()
            for node in self._live():
                self._send(node)
                allowed_s = self._lost_after_s + node.link.unreceived_bytes() / RECEIVED_BYTES_PER_S
                if (silent_s := self._clock() - node.last_seen) > allowed_s:
                    self._record_loss(node, f"node {node.link.name} was lost: it has not answered for {silent_s:.1f} s")

    def _clock(self) -> float:
        """Return a time in seconds that stands still while this process is paused."""
        return time.monotonic() - self._paused_s

    def _record_loss(self, node: _Node, reason: str) -> None:
        with self._lock:
            if node.lost:
                return
            node.lost = reason
            ranks = ranks_of_node(self._specs, node.number)
            if ranks:
                self._arrivals.put((self._generation, NodeLost(node.number, tuple(ranks), reason)))


def _by_rank(nodes: Sequence[_Node], name: str) -> dict[int, int]:
    return {int(rank): value for node in nodes for rank, value in node.facts.get(name, {}).items()}
