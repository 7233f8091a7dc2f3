"""The engine for this machine: one zygote and workers forked from it, without named files and network ports."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from accel_nb.errors import PoolError
from accel_nb.pool.channel import Channel, ChannelError
from accel_nb.pool.engine import (
    Arrival,
    EngineFacts,
    EngineRequest,
    EventsArrived,
    ObservedState,
    OutputArrived,
    RecordArrived,
    WorkerEnded,
    WorkerSpec,
    ranks_of_node,
)
from accel_nb.pool.local.ordered_text import OrderedText
from accel_nb.pool.local.shared_payloads import SharedPayloads, StoreFile, receive_record, send_record
from accel_nb.pool.messages import (
    Exited,
    Fork,
    Forked,
    ForkFailed,
    Kill,
    QueryLocation,
    RankMessage,
    Reply,
    StackTraced,
    TraceStack,
    WorkerStart,
    ZygoteReady,
    encode,
)
from accel_nb.pool.payload import NO_PAYLOADS, Payload, Payloads
from accel_nb.runtime.process.environment import notebook_variables, zygote_environment
from accel_nb.runtime.process.loopback import find_loopback
from accel_nb.runtime.process.oom_detection import KillCounters
from accel_nb.runtime.process.platforms import detect_platform
from accel_nb.telemetry.ring import RingReader, create_ring

logger = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
MAX_READ_BYTES = 4 * 1024 * 1024
"""After this many bytes the rest is read in the next call, so that one rank cannot starve the others."""
TRACE_BYTES = 64 * 1024
ZYGOTE_TIMEOUT_S = 180.0
END_TIMEOUT_S = 30.0
_TOO_MANY_FILES = (
    ". Each worker takes five open files of the notebook's process: close some, or raise the limit (ulimit -n)"
)
_REMEDIES = {
    errno.EMFILE: _TOO_MANY_FILES,
    errno.ENFILE: _TOO_MANY_FILES,
    errno.ENOENT: ". The notebook's working folder was deleted: change to another one with %cd",
}
_READ_ORDER = ("stdout", "stderr", "control", "zygote")


@dataclass(slots=True)
class _WorkerConnections:
    """The kernel's ends of the connections to one worker."""

    control: Channel
    monitor: Channel
    stdout: int
    stderr: int
    ring: RingReader
    trace: int
    pid: int | None = None
    texts: dict[str, OrderedText] = field(
        default_factory=lambda: {name: OrderedText() for name in ("stdout", "stderr")}
    )
    _num_read: int = 0

    def read_trace(self) -> str:
        """Return the stack that faulthandler has written in the worker since the last call."""
        data = os.pread(self.trace, TRACE_BYTES, self._num_read)
        self._num_read += len(data)
        return data.decode(errors="replace")

    def close(self) -> None:
        self.control.close()
        self.monitor.close()
        self.ring.close()
        for descriptor in (self.stdout, self.stderr, self.trace):
            os.close(descriptor)


class GroupStores(Protocol):
    """The stores by which the ranks of a node find those of all nodes when they open a process group."""

    def renew(self) -> None:
        """Use a new store from now on."""
        ...

    def connect(self, rank: int) -> int:
        """Return a descriptor by which a rank reaches the store; the caller closes it."""
        ...

    def payloads(self) -> Payloads:
        """Return the payloads with which ranks that run already open the store; this object closes them."""
        ...

    def close(self) -> None:
        """Release all resources; a second call does nothing."""
        ...


class FileStores:
    """One anonymous file for each process group, for ranks on one machine."""

    def __init__(self) -> None:
        self._file: int | None = None

    def renew(self) -> None:
        """Create a new file."""
        self.close()
        self._file = os.memfd_create("accel_nb_store", os.MFD_CLOEXEC)

    def connect(self, rank: int) -> int:
        """Return a descriptor of the file."""
        assert self._file is not None
        return os.dup(self._file)

    def payloads(self) -> Payloads:
        """Return the file as a payload."""
        assert self._file is not None
        return {"store": StoreFile(self._file)}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The node of a local engine; the defaults are those of an engine whose workers are all on this machine."""

    number: int = 0
    address: str = "127.0.0.1"
    """The address of node 0."""
    interface: str | None = None
    """The network interface by which ranks reach those of other nodes; empty to leave the choice to the backend, None
    for the one by which processes of this machine reach each other."""


class LocalEngine:
    """Runs workers on this machine. The constructor starts the zygote, which imports in the background."""

    def __init__(
        self,
        program: str,
        *,
        preload: Sequence[str] = (),
        timeout_s: float = 1800.0,
        overrides: Mapping[str, str] | None = None,
        kill_counters: KillCounters | None = None,
        node: NodeSettings | None = None,
        stores: GroupStores | None = None,
    ) -> None:
        self._program = program
        self._preload = list(preload)
        self._timeout_s = timeout_s
        self._overrides = dict(overrides or {})
        self._kill_counters = kill_counters or KillCounters()
        self._specs: list[WorkerSpec] = []
        self._connections: dict[int, _WorkerConnections] = {}
        self._selector = selectors.DefaultSelector()
        self._node = node or NodeSettings()
        self._interface = ""
        self._stores = stores or FileStores()
        self._ready: ZygoteReady | None = None
        self.num_refused = 0
        """The number of packets that were not valid messages."""
        self.payloads = SharedPayloads()
        self._variables: dict[str, str] = {}
        self._launch()

    @property
    def is_warm(self) -> bool:
        """Whether the zygote has reported that it can fork; may be read in any thread."""
        return self._ready is not None

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has something other than measurements to return."""
        return self._selector.fileno()  # type: ignore[attr-defined]

    def facts(self) -> EngineFacts:
        """Return the latest known state of zygote and workers; forking is safe if the zygote has one thread."""
        num_threads = 1 if self._ready is None else self._ready.num_threads
        return EngineFacts(self.is_warm, num_threads, self._variables, self.pids, self.zygote_pid)

    def refresh(self) -> None:
        """Read what the zygote has reported, without waiting."""
        if self._ready is None and not self._connections:
            self.poll(0)

    @property
    def zygote_pid(self) -> int:
        """The process id of the zygote."""
        return self._zygote.pid

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers by rank, as far as known; may be read in any thread."""
        return {
            rank: connections.pid
            for rank, connections in dict(self._connections).items()
            if connections.pid is not None
        }

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Fork one worker for each spec of this node, in place of those that run.

        Waits for the zygote's imports if needed.
        """
        self._interface = find_loopback() if self._node.interface is None else self._node.interface
        if self._zygote.poll() is not None:
            self._relaunch()
        self._end_workers()
        self._specs = list(specs)
        self._await_zygote()
        self._stores.renew()
        for rank in ranks_of_node(specs, self._node.number):
            self._fork(rank)

    def send(self, rank: int, record: object, payloads: Payloads = NO_PAYLOADS, *, urgent: bool = False) -> bool:
        """Send a record to a rank; return False if the rank has ended.

        An urgent record is dropped if the rank has not read those of the last minutes: it may be stopped for ever.
        """
        connections = self._connections.get(rank)
        if connections is None:
            return False
        try:
            with suppress(BlockingIOError):
                send_record(connections.monitor if urgent else connections.control, record, payloads, waits=not urgent)
            if isinstance(record, QueryLocation) and record.from_outside:
                self._send_to_zygote(TraceStack(rank))
        except (ConnectionError, PoolError):
            return False
        return True

    def poll(self, timeout_s: float) -> list[Arrival]:
        """Return the arrivals; wait at most ``timeout_s`` seconds for the first one."""
        arrivals: list[Arrival] = []
        ready = self._selector.select(timeout_s)
        # A rank's output is read before its reply, and the reply before its exit notice.
        for key, _ in sorted(ready, key=lambda item: _READ_ORDER.index(item[0].data[0])):
            kind, rank = key.data
            if kind == "zygote":
                arrivals += self._read_zygote()
            elif kind == "control":
                arrivals += self._read_control(rank)
            else:
                arrivals += self._read_output(rank, kind)
        for rank, connections in self._connections.items():
            if events := connections.ring.read():
                arrivals.append(EventsArrived(rank, tuple(events)))
        return arrivals

    def kill(self, rank: int) -> None:
        """Make the zygote send SIGKILL to a rank and to the processes that the rank started."""
        self._send_to_zygote(Kill(rank))

    def replace(self, ranks: Sequence[int]) -> Payloads:
        """Fork new workers for ended ranks; return the file of the new process group store as a payload."""
        self._stores.renew()
        for rank in ranks:
            self._fork(rank)
        return self._stores.payloads()

    def stop(self) -> None:
        """End the zygote, which kills every worker; close pipes, rings and the store."""
        self._selector.close()
        self._control.close()
        for rank in list(self._connections):
            self._connections.pop(rank).close()
        self._stores.close()
        try:
            self._zygote.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
        if self._errors is not None:
            os.close(self._errors)
            self._errors = None

    def _launch(self) -> None:
        self._variables = notebook_variables()
        self._control, theirs = Channel.pair()
        self._errors: int | None = os.memfd_create("accel_nb_zygote_errors", os.MFD_CLOEXEC)
        try:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "accel_nb.pool.local.zygote", str(theirs.fileno()), *self._preload],
                pass_fds=[theirs.fileno()],
                env={**detect_platform().worker_variables, **zygote_environment(), **self._overrides},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._selector.register(self._control, selectors.EVENT_READ, ("zygote", -1))

    def _relaunch(self) -> None:
        """Start a new zygote in place of one that died; its workers have ended with it."""
        for rank in list(self._connections):
            self._remove_ended(rank, -9)
        with suppress(KeyError):
            self._selector.unregister(self._control)
        self._control.close()
        self._ready = None
        assert self._errors is not None
        os.close(self._errors)
        self._launch()

    def _end_workers(self) -> None:
        for rank in self._connections:
            self.kill(rank)
        deadline = time.monotonic() + END_TIMEOUT_S
        while self._connections:
            self.poll(0.2)
            if time.monotonic() > deadline:
                raise PoolError(f"ranks {sorted(self._connections)} do not end; `%accelerate restart` starts over")

    def _await_zygote(self) -> None:
        deadline = time.monotonic() + ZYGOTE_TIMEOUT_S
        while self._ready is None:
            if self._zygote.poll() is not None or time.monotonic() > deadline:
                raise PoolError(f"the process that workers are forked from did not start:\n{self._zygote_errors()}")
            self.poll(0.2)

    def _zygote_errors(self) -> str:
        assert self._errors is not None
        size = os.fstat(self._errors).st_size
        return os.pread(self._errors, 8192, max(0, size - 8192)).decode(errors="replace") or "(it printed nothing)"

    def _send_to_zygote(self, record: object, descriptors: Sequence[int] = ()) -> None:
        try:
            self._control.send(encode(record), descriptors)
        except OSError as error:
            raise PoolError(f"the process that workers are forked from is gone:\n{self._zygote_errors()}") from error

    def _fork(self, rank: int) -> None:
        try:
            with ExitStack() as on_failure:
                self._connections[rank] = self._connect(rank, on_failure)
                on_failure.pop_all()
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "")
            raise PoolError(f"rank {rank} could not be started: {error.strerror}{remedy}") from error
        connections = self._connections[rank]
        self._selector.register(connections.control, selectors.EVENT_READ, ("control", rank))
        self._selector.register(connections.stdout, selectors.EVENT_READ, ("stdout", rank))
        self._selector.register(connections.stderr, selectors.EVENT_READ, ("stderr", rank))

    def _connect(self, rank: int, on_failure: ExitStack) -> _WorkerConnections:
        """Create the connections of a worker and request its fork; ``on_failure`` closes this process's ends."""
        with ExitStack() as on_exit:
            control, their_control = Channel.pair()
            on_failure.callback(control.close)
            on_exit.callback(their_control.close)
            monitor, their_monitor = Channel.pair()
            on_failure.callback(monitor.close)
            on_exit.callback(their_monitor.close)
            ends: list[tuple[int, int]] = []
            for _ in range(2):
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                on_failure.callback(os.close, ours)
                on_exit.callback(os.close, theirs)
                os.set_blocking(ours, False)
                with suppress(OSError):  # a system-wide limit may be lower
                    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 1024 * 1024)
                ends.append((ours, theirs))
            ring = create_ring()
            reader = RingReader(ring)
            on_failure.callback(reader.close)
            trace = os.memfd_create("accel_nb_trace", os.MFD_CLOEXEC)
            on_failure.callback(os.close, trace)
            spec = self._specs[rank]
            neighbors = ranks_of_node(self._specs, spec.node)
            start = WorkerStart(
                rank=rank,
                size=len(self._specs),
                device=spec.device,
                num_threads=spec.num_threads,
                program=self._program,
                cwd=os.getcwd(),
                sys_path=[entry for entry in sys.path if isinstance(entry, str)],
                timeout_s=self._timeout_s,
                node=spec.node,
                local_rank=neighbors.index(rank),
                local_size=len(neighbors),
                address=self._node.address,
                interface=self._interface,
            )
            store = self._stores.connect(rank)
            on_exit.callback(os.close, store)
            (stdout, their_stdout), (stderr, their_stderr) = ends
            channels = their_control.fileno(), their_monitor.fileno()
            theirs = (*channels, their_stdout, their_stderr, ring, store, trace)
            self._send_to_zygote(Fork(rank, start), theirs)
            return _WorkerConnections(control, monitor, stdout, stderr, reader, trace)

    def _read_zygote(self) -> list[Arrival]:
        try:
            record, _ = self._receive(self._control)
        except ChannelError:
            return []
        except (EOFError, OSError):
            self._selector.unregister(self._control)
            return [arrival for rank in list(self._connections) for arrival in self._remove_ended(rank, -9)]
        if isinstance(record, ZygoteReady):
            self._ready = record
        elif isinstance(record, Forked) and record.rank in self._connections:
            self._connections[record.rank].pid = record.pid
        elif isinstance(record, ForkFailed):
            return self._remove_ended(
                record.rank, 1, f"could not be started: the system refused a new process ({record.reason})"
            )
        elif isinstance(record, StackTraced) and record.rank in self._connections:
            return [ObservedState(record.rank, record.state, self._connections[record.rank].read_trace)]
        elif isinstance(record, Exited):
            return self._remove_ended(record.rank, record.code)
        return []

    def _receive(self, channel: Channel) -> tuple[Any, dict[str, Payload]]:
        """Return the next record; count an invalid packet and raise ChannelError. Later packets can still be read."""
        try:
            return receive_record(channel)
        except ChannelError:
            self.num_refused += 1
            if self.num_refused == 1:
                logger.warning("a worker sent data that is not a valid message; such data is dropped")
            raise

    def _read_control(self, rank: int) -> list[Arrival]:
        if rank not in self._connections:
            return []
        try:
            record, payloads = self._receive(self._connections[rank].control)
        except ChannelError:
            return []
        except (EOFError, OSError):
            with suppress(KeyError):
                self._selector.unregister(self._connections[rank].control)
            return []  # the zygote's exit notice follows and has the reason
        # Output that the rank printed before it sent this record is already in its pipes: return it first.
        arrivals = self._read_output(rank, "stdout") + self._read_output(rank, "stderr")
        connections = self._connections[rank]
        if isinstance(record, Reply):
            arrivals += _arrivals(rank, {name: text.finish() for name, text in connections.texts.items()})
        if events := connections.ring.read():
            arrivals.append(EventsArrived(rank, tuple(events)))
        arrivals.append(RecordArrived(rank, record, payloads))
        if isinstance(record, RankMessage) and record.mark:
            arrivals += _arrivals(
                rank, {name: text.record_message(record.mark) for name, text in connections.texts.items()}
            )
        return arrivals

    def _read_output(self, rank: int, stream: str) -> list[Arrival]:
        connections = self._connections.get(rank)
        if connections is None:
            return []
        descriptor = connections.stdout if stream == "stdout" else connections.stderr
        chunks: list[Arrival] = []
        num_read = 0
        while num_read <= MAX_READ_BYTES:
            try:
                data = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                with suppress(KeyError):
                    self._selector.unregister(descriptor)
                break
            num_read += len(data)
            chunks += _arrivals(rank, {stream: connections.texts[stream].add(data)})
        return chunks

    def _remove_ended(self, rank: int, code: int, reason: str = "") -> list[Arrival]:
        """Read the last data of an ended rank, close its connections and return its end as the last arrival."""
        connections = self._connections.get(rank)
        if connections is None:
            return []
        arrivals: list[Arrival] = []
        poller = select.poll()
        poller.register(connections.control, select.POLLIN)
        while poller.poll(0) and (rest := self._read_control(rank)):
            arrivals += rest
        arrivals += self._read_output(rank, "stdout") + self._read_output(rank, "stderr")
        arrivals += _arrivals(rank, {name: text.finish() for name, text in connections.texts.items()})
        if events := connections.ring.read():
            arrivals.append(EventsArrived(rank, tuple(events)))
        for ours in (connections.control, connections.stdout, connections.stderr):
            with suppress(KeyError, ValueError):
                self._selector.unregister(ours)
        stack = connections.read_trace() if code < 0 else ""
        del self._connections[rank]
        connections.close()
        killed_for = self._kill_counters.kill_cause() if code == -signal.SIGKILL else "unknown"
        return [*arrivals, WorkerEnded(rank, code, reason, stack, killed_for)]


def _arrivals(rank: int, texts: Mapping[str, bytes]) -> list[Arrival]:
    return [OutputArrived(rank, stream, text) for stream, text in texts.items() if text]


def start_local_engine(request: EngineRequest) -> LocalEngine:
    """Start the process that workers on this machine are forked from."""
    return LocalEngine(request.program, preload=request.preload, overrides=request.overrides)
