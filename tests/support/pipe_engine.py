"""An engine without shared memory: each worker is a plain process, and all data are sent over its two pipes."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from accel_nb.pool.engine import (
    Arrival,
    EngineFacts,
    EventsArrived,
    OutputArrived,
    RecordArrived,
    WorkerEnded,
    WorkerSpec,
)
from accel_nb.pool.messages import decode
from accel_nb.pool.payload import NO_PAYLOADS, MemoryPayloads, Payloads
from accel_nb.telemetry.events import from_message
from tests.support.pipe_frames import read_frame, write_record


class PipeEngine:
    """Runs workers as `tests.support.pipe_worker`, without a process group."""

    def __init__(self, program: str) -> None:
        self.payloads = MemoryPayloads()
        self._program = program
        self._specs: list[WorkerSpec] = []
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self._arrivals: queue.Queue[Arrival] = queue.Queue()

    def facts(self) -> EngineFacts:
        return EngineFacts(True, 1, {}, {rank: worker.pid for rank, worker in self._workers.items()}, None)

    def refresh(self) -> None:
        pass

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        self.stop()
        self._arrivals = queue.Queue()
        self._specs = list(specs)
        self.replace(range(len(specs)))

    def send(self, rank: int, record: object, payloads: Payloads = NO_PAYLOADS, *, urgent: bool = False) -> bool:
        worker = self._workers[rank]
        assert worker.stdin is not None
        try:
            write_record(worker.stdin, record, payloads)
        except OSError:
            return False
        return True

    def poll(self, timeout_s: float) -> list[Arrival]:
        arrivals: list[Arrival] = []
        with suppress(queue.Empty):
            arrivals.append(self._arrivals.get(timeout=timeout_s) if timeout_s else self._arrivals.get_nowait())
            while True:
                arrivals.append(self._arrivals.get_nowait())
        return arrivals

    def kill(self, rank: int) -> None:
        self._workers[rank].kill()

    def replace(self, ranks: Sequence[int]) -> Payloads:
        for rank in ranks:
            if rank in self._workers:
                _close(self._workers[rank])
            command = [sys.executable, "-m", "tests.support.pipe_worker", self._program, str(rank)]
            self._workers[rank] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            reader = threading.Thread(target=self._read, args=(rank, self._workers[rank], self._arrivals))
            self._readers.append(reader)
            reader.start()
        return NO_PAYLOADS

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        for reader in self._readers:
            reader.join()
        for worker in self._workers.values():
            _close(worker)
        self._workers, self._readers = {}, []

    @staticmethod
    def _read(rank: int, worker: subprocess.Popen[bytes], arrivals: queue.Queue[Arrival]) -> None:
        assert worker.stdout is not None
        with suppress(EOFError):
            while True:
                message, payloads = read_frame(worker.stdout)
                if message["kind"] == "printed":
                    arrivals.put(OutputArrived(rank, message["stream"], message["text"].encode()))
                elif message["kind"] == "measured":
                    arrivals.put(EventsArrived(rank, (from_message(message["event"]),)))
                else:
                    arrivals.put(RecordArrived(rank, decode(message), payloads))
        arrivals.put(WorkerEnded(rank, worker.wait()))


def _close(worker: subprocess.Popen[bytes]) -> None:
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
