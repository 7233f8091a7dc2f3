"""The main loop of a worker process: take a request, let the program do it, answer.

A worker has two channels. Requests and replies use the first, in the main thread. The second is read by a monitor
thread, which can interrupt the main thread and cut the process group's connections while a collective blocks it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import importlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from accel_nb.pool.channel import Channel
from accel_nb.pool.control.stack_report import where_is
from accel_nb.pool.local.shared_payloads import SharedPayloads, StoreFile, receive_record, send_record
from accel_nb.pool.messages import (
    ActionDone,
    Cut,
    Decide,
    Finish,
    FinishAnswer,
    Interrupt,
    Look,
    Note,
    PositionReport,
    Reply,
    Request,
    Start,
    Steer,
    StepCount,
    Stopped,
    WorkerReady,
    decode,
    encode,
)
from accel_nb.pool.payload import Payloads, close_all, find_payload
from accel_nb.pool.program import Program, TaskResult
from accel_nb.runtime.process.environment import become_rank, restore_threads
from accel_nb.runtime.world import World
from accel_nb.telemetry.events import Event, MetricLogged, to_message
from accel_nb.telemetry.ring import RingWriter

TRACE_SIGNAL = signal.SIGRTMAX - 5
"""At this signal a worker writes its Python stack without asking the interpreter; a number that nobody uses."""

_PR_SET_PDEATHSIG = 1
_STORE_NUMBERS = 128
_END_OF_STORE_NUMBERS = 4096  # the system keeps a table up to the highest number in use


class Worker:
    """One rank: its world, its process group, its way to the kernel."""

    def __init__(self, start: Start, control: Channel, monitor: Channel, ring: RingWriter, store: int) -> None:
        from accel_nb.runtime.distributed.process_group import Group
        from accel_nb.runtime.distributed.shared_group import lend_default_group

        self.world = World(
            rank=start.rank,
            size=start.size,
            local_rank=start.rank,
            local_size=start.size,
            device=start.device,
        )
        become_rank(self.world)
        self.payloads = SharedPayloads()
        self._control = control
        self._monitor = monitor
        self._ring = ring
        self._cutting = threading.Lock()
        self._running: int | None = None
        self._interrupted: int | None = None
        # The request whose interrupt came while none of its user code ran, and the newest whose user code has ended.
        self._pending: int | None = None
        self._through = 0
        self._number = 0
        self._num_stores = 0
        self._store = self._keep(store)
        os.close(store)
        self.group = Group.open(self.world, _path(self._store), timeout_s=start.timeout_s)
        lend_default_group()
        module, _, attribute = start.program.partition(":")
        self._program: Program = getattr(importlib.import_module(module), attribute)(self)

    def emit(self, event: Event) -> None:
        """Send an event: numbers through the ring, the rest as a note."""
        if RingWriter.takes(event):
            self._ring.write(event)  # type: ignore[arg-type]
        else:
            self.note("event", to_message(event))

    def emit_step(self, *values: Any) -> None:
        """Take the fields of a `StepDone`."""
        self._ring.write_step(*values)

    def emit_metric(self, rank: int, step: int, time: float, name: str, value: float) -> None:
        """Take the fields of a `MetricLogged`."""
        if not self._ring.write_metric(rank, step, time, name, value):
            self.emit(MetricLogged(rank, step, time, name, value))

    def note(self, topic: str, body: dict[str, Any]) -> None:
        """Report something about the running request to the kernel."""
        self._control.send(encode(Note(self._number, topic, body)))

    def tell_steered(self, wish: int, step: int, text: str) -> None:
        """Tell the kernel that something it had asked for was done after a step."""
        self._control.send(encode(ActionDone(self._number, wish, step, text)))

    def serve(self) -> None:
        """Answer requests until the kernel closes the channel."""
        threading.Thread(target=self._watch, name="accel_nb monitor", daemon=True).start()
        self._control.send(encode(WorkerReady(self.world.rank, os.getpid())))
        while True:
            try:
                request, payloads = receive_record(self._control)
            except EOFError:
                return
            if isinstance(request, Request):
                self._answer(request, payloads)

    @property
    def was_interrupted(self) -> bool:
        """Whether the user, or another rank's failure, interrupted the running request."""
        return self._interrupted == self._number

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let interrupts of the running request raise KeyboardInterrupt inside of the block, and only there.

        One that has come before the block raises as it begins.
        """
        try:
            try:
                with self._cutting:
                    self._running = self._number
                    if self._pending == self._number:
                        self._interrupted = self._number
                if self.was_interrupted:
                    raise KeyboardInterrupt
                yield
            finally:
                self._running = None
        finally:
            self._running = None
            with self._cutting:  # a cut that has begun belongs to this block: let it end before anything else starts
                self._through = self._number
                if self.was_interrupted:
                    self._tell_stopped(self._number)

    def _answer(self, request: Request, payloads: Payloads) -> None:
        self._number = request.number
        signal.signal(signal.SIGINT, self._on_interrupt)  # an earlier cell may have set its own
        action = self._reopen if request.task == "reopen" else self._program.handle
        try:
            result = action(request.task, request.body, payloads)
        except BaseException as error:
            result = TaskResult("raised", self._program.describe_error(error))
        finally:
            close_all(payloads.values())
        with self._cutting:
            self._through = request.number
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError, OSError):  # the cell may have closed it
                stream.flush()
        send_record(self._control, Reply(request.number, result.outcome, result.body), result.payloads)
        close_all(result.payloads.values())

    def _reopen(self, task: str, body: dict[str, Any], payloads: Payloads) -> TaskResult:
        new = find_payload(payloads, "store", StoreFile)
        assert new is not None, "the kernel sends the new store with this request"
        store, self._store = self._store, self._keep(new.descriptor)
        self.group.reopen(_path(self._store))
        os.close(store)
        self._program.reopened()
        return TaskResult("done", {})

    def _keep(self, store: int) -> int:
        """Copy a store's descriptor to a number that no earlier store had, and that no other file is given.

        A process group lives as long as anything refers to it, and its store opens the path once more as it goes.
        """
        end = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _END_OF_STORE_NUMBERS)
        place = end - _STORE_NUMBERS + self._num_stores % _STORE_NUMBERS
        self._num_stores += 1
        return fcntl.fcntl(store, fcntl.F_DUPFD_CLOEXEC, place)

    def _on_interrupt(self, signum: int, frame: object) -> None:
        if self._running is not None and self._running == self._interrupted:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            try:
                message, _ = self._monitor.receive()
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)
                raise
            record = decode(message)
            with self._cutting:
                if self._running != record.number:
                    self._hear_outside(record)
                elif isinstance(record, Finish):
                    self._interrupted = record.number
                    self._tell_finishing(record.number, will=self._program.finish())
                elif isinstance(record, Steer):
                    self._answer_wish(record, self._program.steer(record.wish, record.action))
                elif isinstance(record, Decide):
                    self._program.decide(record.wish, record.at)
                elif isinstance(record, Interrupt):
                    self._interrupted = record.number
                    signal.pthread_kill(main, signal.SIGINT)
                elif isinstance(record, Cut):
                    self.group.cut()
                elif isinstance(record, Look):
                    self._tell_place(record.number)

    def _hear_outside(self, record: Interrupt | Cut | Finish | Look | Steer | Decide) -> None:
        """Hear what is meant for a request whose user code does not run: not yet, not any more, or not just now."""
        if isinstance(record, Steer):
            self._answer_wish(record, None)
        elif isinstance(record, Look):
            if record.number <= self._through:
                self._tell_place(record.number, has_ended=True)
        elif isinstance(record, Decide):
            pass
        elif record.number <= self._through:
            self._pending = record.number
            self._tell_stopped(record.number)
        elif isinstance(record, Cut):
            self.group.cut()  # what makes a request ready may wait for other ranks too
        else:
            self._pending = record.number
            if isinstance(record, Finish):
                self._tell_finishing(record.number, will=False)

    def _tell_place(self, number: int, *, has_ended: bool = False) -> None:
        main = threading.main_thread().ident
        assert main is not None
        self._control.send(encode(PositionReport(number, where_is(main, self.group, has_ended=has_ended))))

    def _tell_finishing(self, number: int, *, will: bool) -> None:
        self._control.send(encode(FinishAnswer(number, will)))

    def _answer_wish(self, record: Steer, at: int | None) -> None:
        self._control.send(encode(StepCount(record.number, record.wish, at)))

    def _tell_stopped(self, number: int) -> None:
        """Say that user code has ended and only the packing of results goes on: no reason to kill this rank."""
        self._control.send(encode(Stopped(number)))


def _path(descriptor: int) -> str:
    """Return a path that opens an inherited anonymous file: a store that leaves nothing on disk."""
    return f"/proc/self/fd/{descriptor}"


def run_worker(start: Start, descriptors: list[int], *, parent: int) -> int:
    """Turn a freshly forked process into a worker and serve; returns the exit code."""
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the zygote died before the line above took effect
    control, monitor, stdout, stderr, ring, store, trace = descriptors
    _adopt_streams(stdout, stderr)
    faulthandler.enable(trace)
    faulthandler.register(TRACE_SIGNAL, trace)
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


def _adopt_streams(stdout: int, stderr: int) -> None:
    """Make the pipes this process's standard streams, for Python and for C code alike."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = os.fdopen(0, closefd=False)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(descriptor, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")
        setattr(sys, name, stream)
