"""The main loop of a worker process: receives requests, runs them with the program, and replies.

A worker has two channels. Requests and replies use the first, in the main thread. A monitor thread reads the second;
it can interrupt the main thread, and close the process group's connections while a collective blocks that thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import importlib
import os
import resource
import signal
import socket
import stat
import sys
import threading
from collections.abc import Set
from contextlib import AbstractContextManager, suppress
from types import CodeType, FrameType
from typing import Any

from accel_nb.pool.channel import Channel
from accel_nb.pool.control.stack_report import location_of
from accel_nb.pool.local.ordered_text import MarkWriter
from accel_nb.pool.local.shared_payloads import SharedPayloads, StoreFile, receive_record, send_record
from accel_nb.pool.messages import (
    AbortCollective,
    ActionDone,
    DecideAction,
    FinishAnswer,
    FinishStep,
    Interrupt,
    InterruptReport,
    LocationReport,
    ProposeAction,
    QueryLocation,
    RankMessage,
    Reply,
    StepCount,
    Stopped,
    TaskRequest,
    WorkerReady,
    WorkerStart,
    decode,
    encode,
)
from accel_nb.pool.payload import Payloads, close_all, find_payload
from accel_nb.pool.program import Program, TaskResult
from accel_nb.runtime.process.environment import restore_threads, set_rank_variables
from accel_nb.runtime.world import World
from accel_nb.telemetry.events import Event, MetricLogged, to_message
from accel_nb.telemetry.ring import RingWriter

TRACE_SIGNAL = signal.SIGRTMAX - 5
"""On this signal faulthandler writes a worker's Python stack; no library is known to use this signal number."""

_PR_SET_PDEATHSIG = 1
_STORE_NUMBERS = 128
_END_OF_STORE_NUMBERS = 4096  # the operating system allocates a table up to the highest descriptor in use


class Worker:
    """One rank: its world, its process group and its channels to the kernel."""

    def __init__(self, start: WorkerStart, control: Channel, monitor: Channel, ring: RingWriter, store: int) -> None:
        from accel_nb.runtime.distributed.process_group import DefaultGroup
        from accel_nb.runtime.distributed.shared_group import share_default_group

        self.world = World(
            rank=start.rank,
            size=start.size,
            local_rank=start.local_rank,
            local_size=start.local_size,
            device=start.device,
        )
        set_rank_variables(self.world, node=start.node, address=start.address, interface=start.interface)
        self.payloads = SharedPayloads()
        self._control = control
        self._monitor = monitor
        self._ring = ring
        self._request_lock = threading.Lock()
        self._running_request: int | None = None
        self._interrupted_request: int | None = None
        # The request in whose user code KeyboardInterrupt was raised last.
        self._raising_request: int | None = None
        # Numbers of requests: interrupted while no user code of it ran, and the last one whose user code has ended.
        self._interrupted_outside: int | None = None
        self._last_ended = 0
        self._request_number = 0
        self._num_stores = 0
        self._marks = MarkWriter()
        self._store = self._copy_store(store)
        os.close(store)
        self._timeout_s = start.timeout_s
        self.group = DefaultGroup.open(self.world, self._group_store(), timeout_s=start.timeout_s)
        share_default_group(start.timeout_s)
        module, _, attribute = start.program.partition(":")
        self._program: Program = getattr(importlib.import_module(module), attribute)(self)

    def emit(self, event: Event) -> None:
        """Send an event: measurements through the ring buffer, others as a message."""
        if RingWriter.can_write(event):
            self._ring.write(event)  # type: ignore[arg-type]
        else:
            self.send_message("event", to_message(event))

    def emit_step(self, *values: Any) -> None:
        """Write the fields of a `StepDone` to the ring buffer."""
        self._ring.write_step(*values)

    def emit_metric(self, rank: int, step: int, time: float, name: str, value: float) -> None:
        """Write the fields of a `MetricLogged` to the ring buffer, or send them as a message if they do not fit."""
        if not self._ring.write_metric(rank, step, time, name, value):
            self.emit(MetricLogged(rank, step, time, name, value))

    def send_message(self, topic: str, body: dict[str, Any]) -> None:
        """Send a message about the running request to the kernel."""
        self._control.send(encode(RankMessage(self._request_number, topic, body)))

    def send_message_in_order(self, topic: str, body: dict[str, Any]) -> None:
        """Send a message that arrives after the output printed before it, and before the output printed later."""
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "flush"):  # the user's code may have put any object there
                stream.flush()
        self._control.send(encode(RankMessage(self._request_number, topic, body, self._marks.write())))

    def report_action_done(self, action_id: int, step: int, text: str) -> None:
        """Report that a requested action was performed after a step."""
        self._control.send(encode(ActionDone(self._request_number, action_id, step, text)))

    def report_interrupt(self, *, is_raised: bool) -> None:
        """Report that KeyboardInterrupt is raised in the user code, or that the interpreter has ignored it."""
        self._raising_request = self._request_number if is_raised else None
        self._control.send(encode(InterruptReport(self._request_number, is_raised)))

    def serve(self) -> None:
        """Run requests until the kernel closes the channel."""
        sys.unraisablehook = self._handle_unraisable
        threading.Thread(target=self._run_monitor, name="accel_nb monitor", daemon=True).start()
        self._control.send(encode(WorkerReady(self.world.rank, os.getpid())))
        while True:
            try:
                request, payloads = receive_record(self._control)
            except EOFError:
                return
            if isinstance(request, TaskRequest):
                self._run_request(request, payloads)

    @property
    def was_interrupted(self) -> bool:
        """Whether the running request was interrupted, by the user or because another rank failed."""
        return self._interrupted_request == self._request_number

    @property
    def has_raised_interrupt(self) -> bool:
        """Whether KeyboardInterrupt was raised in the user code of the running request."""
        return self._raising_request == self._request_number

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a context manager; only inside of it do interrupts of the running request raise KeyboardInterrupt.

        An interrupt that arrived earlier is raised on entry.
        """
        return _InterruptibleBlock(self)

    def begin_user_code(self) -> None:
        """Begin a block that can be interrupted; raise KeyboardInterrupt if it has been already."""
        with self._request_lock:
            self._running_request = self._request_number
            if self._interrupted_outside == self._request_number:
                self._interrupted_request = self._request_number
        if self.was_interrupted:
            self.end_user_code()
            raise KeyboardInterrupt

    def end_user_code(self) -> None:
        """End a block that can be interrupted."""
        self._running_request = None
        with self._request_lock:  # wait if the monitor thread is handling a record for this block
            self._last_ended = self._request_number
            if self.was_interrupted:
                self._send_stopped(self._request_number)

    def _run_request(self, request: TaskRequest, payloads: Payloads) -> None:
        self._request_number = request.number
        signal.signal(signal.SIGINT, self._on_interrupt)  # an earlier cell may have set another handler
        action = self._reopen if request.task == "reopen" else self._program.handle
        try:
            result = action(request.task, request.body, payloads)
        except BaseException as error:
            result = TaskResult("raised", self._program.describe_error(error))
        finally:
            close_all(payloads.values())
        with self._request_lock:
            self._last_ended = request.number
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError, OSError):  # the cell may have closed it
                stream.flush()
        send_record(
            self._control,
            Reply(request.number, result.outcome, result.body, result.interrupted_exchange),
            result.payloads,
        )
        close_all(result.payloads.values())

    def _reopen(self, task: str, body: dict[str, Any], payloads: Payloads) -> TaskResult:
        new = find_payload(payloads, "store", StoreFile)
        assert new is not None, "the kernel sends the new store with this request"
        store, self._store = self._store, self._copy_store(new.descriptor)
        self.group.reopen(self._group_store())
        os.close(store)
        self._program.on_group_reopened()
        return TaskResult("done", {})

    def _copy_store(self, store: int) -> int:
        """Duplicate a store's descriptor to a number that none of the latest stores had and that no other file gets.

        A process group exists as long as it is referenced, and its store opens the path again when it is destroyed.
        """
        end = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _END_OF_STORE_NUMBERS)
        place = end - _STORE_NUMBERS + self._num_stores % _STORE_NUMBERS
        self._num_stores += 1
        return fcntl.fcntl(store, fcntl.F_DUPFD_CLOEXEC, place)

    def _group_store(self) -> Any:
        """Return the path of the store's file, or a store over its socket."""
        if not stat.S_ISSOCK(os.fstat(self._store).st_mode):
            return _path(self._store)
        from accel_nb.runtime.distributed.socket_store import SocketStore

        return SocketStore(socket.socket(fileno=os.dup(self._store)), timeout_s=self._timeout_s)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._running_request is not None and self._running_request == self._interrupted_request:
            is_raised = not _is_called_by(frame, _NOT_INTERRUPTIBLE)
            self.report_interrupt(is_raised=is_raised)
            if is_raised:
                self._mark_interrupted(True)
                raise KeyboardInterrupt

    def _mark_interrupted(self, is_interrupted: bool) -> None:
        """Set whether ranks may be at different steps: they were interrupted, until the group is opened again."""
        if self.world.size > 1:  # else the group stays open
            type(self.group).is_interrupted = is_interrupted

    def _handle_unraisable(self, ignored: sys.UnraisableHookArgs) -> None:
        """Report an interrupt that was raised in a destructor or a callback, where the interpreter ignores errors."""
        is_interrupt = issubclass(ignored.exc_type, KeyboardInterrupt)
        if is_interrupt and self._running_request is not None and self._running_request == self._interrupted_request:
            self._mark_interrupted(False)
            self.report_interrupt(is_raised=False)
        else:
            sys.__unraisablehook__(ignored)

    def _run_monitor(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            try:
                message, _ = self._monitor.receive()
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)
                raise
            record = decode(message)
            with self._request_lock:
                if self._running_request != record.number:
                    self._handle_outside(record)
                elif isinstance(record, FinishStep):
                    self._interrupted_request = record.number
                    self._send_finish_answer(record.number, will_end=self._program.finish_step())
                elif isinstance(record, ProposeAction):
                    self._send_step_count(record, self._program.propose_action(record.action_id, record.action))
                elif isinstance(record, DecideAction):
                    self._program.decide_action(record.action_id, record.count)
                elif isinstance(record, Interrupt):
                    self._interrupted_request = record.number
                    signal.pthread_kill(main, signal.SIGINT)
                elif isinstance(record, AbortCollective):
                    self.group.shut_down_connections()
                elif isinstance(record, QueryLocation):
                    self._send_location(record.number)

    def _handle_outside(
        self, record: Interrupt | AbortCollective | FinishStep | QueryLocation | ProposeAction | DecideAction
    ) -> None:
        """Handle a record for a request whose user code does not run: not yet, no longer, or not at this moment."""
        if isinstance(record, ProposeAction):
            self._send_step_count(record, None)
        elif isinstance(record, QueryLocation):  # before the user code the rank may import modules, which takes long
            self._send_location(record.number, has_ended=record.number <= self._last_ended)
        elif isinstance(record, DecideAction):
            pass
        elif record.number <= self._last_ended:
            self._interrupted_outside = record.number
            self._send_stopped(record.number)
        elif isinstance(record, AbortCollective):
            self.group.shut_down_connections()  # the preparation of a request may wait for other ranks too
        else:
            self._interrupted_outside = record.number
            if isinstance(record, FinishStep):
                self._send_finish_answer(record.number, will_end=False)

    def _send_location(self, number: int, *, has_ended: bool = False) -> None:
        """Send where in the code this rank is, and its last collective, as the answer to `QueryLocation`."""
        main = threading.main_thread().ident
        assert main is not None
        self._control.send(encode(LocationReport(number, location_of(main, self.group, has_ended=has_ended))))

    def _send_finish_answer(self, number: int, *, will_end: bool) -> None:
        self._control.send(encode(FinishAnswer(number, will_end)))

    def _send_step_count(self, record: ProposeAction, count: int | None) -> None:
        self._control.send(encode(StepCount(record.number, record.action_id, count)))

    def _send_stopped(self, number: int) -> None:
        """Report that user code has ended, so that this rank is not killed while it packs results."""
        self._control.send(encode(Stopped(number)))


class _InterruptibleBlock:
    """The context manager of `Worker.interruptible`.

    No interrupt is raised in its methods: the block would not be ended, and the next one would end with it when the
    error of the interrupt is freed.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._worker.begin_user_code()

    def __exit__(self, *error: object) -> None:
        self._worker.end_user_code()


_NOT_INTERRUPTIBLE = frozenset(
    method.__code__
    for method in (
        _InterruptibleBlock.__enter__,
        _InterruptibleBlock.__exit__,
        Worker._handle_unraisable,  # the interpreter ignores errors that are raised in it
    )
)
"""The functions in which no interrupt is raised, nor in functions that they call."""


def _is_called_by(frame: FrameType | None, codes: Set[CodeType]) -> bool:
    """Return whether a frame, or one of its callers, runs one of the code objects."""
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def _path(descriptor: int) -> str:
    """Return a path that opens an inherited anonymous file, so that a store needs no file on disk."""
    return f"/proc/self/fd/{descriptor}"


def write_stack_on_signal(descriptor: int) -> None:
    """Register a handler of `TRACE_SIGNAL` that writes the Python stack of the thread that receives it.

    The system prefers the main thread.

    faulthandler reads the stacks of other threads while these run, which sometimes ends the process by SIGSEGV.
    """
    faulthandler.register(TRACE_SIGNAL, descriptor, all_threads=False)


def run_worker(start: WorkerStart, descriptors: list[int], *, parent: int) -> int:
    """Run a worker in a process that was just forked; return the exit code."""
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the zygote died before the line above took effect
    control, monitor, stdout, stderr, ring, store, trace = descriptors
    _replace_streams(stdout, stderr)
    faulthandler.enable(trace)
    write_stack_on_signal(trace)
    restore_threads()
    os.chdir(start.cwd)
    sys.path[:] = start.sys_path
    import torch

    torch.set_num_threads(start.num_threads)
    worker = Worker(
        start,
        Channel.from_descriptor(control),
        Channel.from_descriptor(monitor),
        RingWriter(ring),
        store,
    )
    os.close(ring)
    worker.serve()
    return 0


def _replace_streams(stdout: int, stderr: int) -> None:
    """Replace this process's standard streams by the pipes, for both Python and C code."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = os.fdopen(0, closefd=False)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(descriptor, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")
        setattr(sys, name, stream)
