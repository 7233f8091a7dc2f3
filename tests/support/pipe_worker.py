"""The worker process of `PipeEngine`: ``python -m tests.support.pipe_worker PROGRAM RANK``."""

from __future__ import annotations

import importlib
import io
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from accel_nb.pool.messages import (
    FinishAnswer,
    FinishStep,
    Interrupt,
    RankMessage,
    Reply,
    Stopped,
    TaskRequest,
    WorkerReady,
)
from accel_nb.pool.payload import MemoryPayloads, Payloads
from accel_nb.pool.program import Program, TaskResult
from accel_nb.telemetry.events import Event, to_message
from tests.support.pipe_frames import read_record, write_frame, write_record


class PipeWorker:
    """Reads records in a thread, and runs requests in the main thread."""

    def __init__(self, program: str, rank: int, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self.payloads = MemoryPayloads()
        self._rank = rank
        self._incoming, self._outgoing = incoming, outgoing
        self._sending = threading.Lock()
        self._requests: queue.Queue[tuple[TaskRequest, Payloads] | None] = queue.Queue()
        self._number = self._interrupted = 0
        self._running: int | None = None
        module, _, attribute = program.partition(":")
        self._program: Program = getattr(importlib.import_module(module), attribute)(self)

    def send_message(self, topic: str, body: dict[str, Any]) -> None:
        self._send(RankMessage(self._number, topic, body))

    def emit(self, event: Event) -> None:
        self._send_frame({"kind": "measured", "event": to_message(event)})

    def write_text(self, stream: str, text: str) -> None:
        self._send_frame({"kind": "printed", "stream": stream, "text": text})

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        try:
            self._running = self._number
            if self._interrupted == self._number:
                raise KeyboardInterrupt
            yield
        finally:
            self._running = None
            if self._interrupted == self._number:
                self._send(Stopped(self._number))

    def serve(self) -> None:
        signal.signal(signal.SIGINT, self._on_interrupt)
        threading.Thread(target=self._read, daemon=True).start()
        self._send(WorkerReady(self._rank, os.getpid()))
        while (item := self._requests.get()) is not None:
            request, payloads = item
            self._number = request.number
            try:
                if request.task == "reopen":
                    self._program.on_group_reopened()
                    result = TaskResult("done", {})
                else:
                    result = self._program.handle(request.task, request.body, payloads)
            except BaseException as error:
                result = TaskResult("raised", self._program.describe_error(error))
            self._send(Reply(request.number, result.outcome, result.body, result.interrupted_exchange), result.payloads)

    def _read(self) -> None:
        while True:
            try:
                record, payloads = read_record(self._incoming)
            except (EOFError, ValueError):
                self._requests.put(None)
                return
            if isinstance(record, TaskRequest):
                self._requests.put((record, payloads))
            elif isinstance(record, FinishStep):
                self._send(FinishAnswer(record.number, False))
            elif isinstance(record, Interrupt):
                self._interrupted = record.number
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _on_interrupt(self, signum: int, frame: object) -> None:
        if self._running is not None and self._running == self._interrupted:
            raise KeyboardInterrupt

    def _send(self, record: object, payloads: Payloads | None = None) -> None:
        with self._sending:
            write_record(self._outgoing, record, payloads or {})

    def _send_frame(self, message: dict[str, Any]) -> None:
        with self._sending:
            write_frame(self._outgoing, message)


class _Stream(io.TextIOBase):
    """A text stream that sends what is written."""

    def __init__(self, worker: PipeWorker, name: str) -> None:
        self._worker, self._name = worker, name

    def write(self, text: str) -> int:
        self._worker.write_text(self._name, text)
        return len(text)


if __name__ == "__main__":
    worker = PipeWorker(sys.argv[1], int(sys.argv[2]), sys.stdin.buffer, sys.stdout.buffer)
    sys.stdout, sys.stderr = _Stream(worker, "stdout"), _Stream(worker, "stderr")
    worker.serve()
