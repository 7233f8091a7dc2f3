"""The clean process from which workers are forked: torch imported, one thread, no device context.

Run as ``python -m accel_nb.pool.local.zygote DESCRIPTOR PRELOAD...``. When the kernel ends, for
any reason, the control channel closes; the zygote then kills every worker and exits.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import sys
import threading
from contextlib import suppress

from accel_nb.pool.channel import Channel
from accel_nb.pool.local.worker import TRACE_SIGNAL, run_worker
from accel_nb.pool.messages import (
    Exited,
    Fork,
    Forked,
    ForkFailed,
    Kill,
    StackTraced,
    TraceStack,
    ZygoteReady,
    decode,
    encode,
    read_types,
)
from accel_nb.runtime.process.temporary_files import remove_temporary_folder

ORPHAN_CHECK_S = 1.0


class Zygote:
    """Forks, reaps and kills workers on request."""

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._ranks: dict[int, int] = {}
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self, preload: list[str]) -> None:
        """Import ``preload``, then handle requests until the kernel has ended."""
        kernel = os.getppid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a thread that blocks signals may have started this process
        # A signal to all processes must not end this one before the workers have saved.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        gc.disable()  # imported objects are never freed: each collection would visit them in vain
        for name in preload:
            module, _, function = name.partition(":")
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()
        read_types()
        gc.collect()
        gc.freeze()
        gc.enable()
        num_threads = (
            len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
        )
        self._control.send(encode(ZygoteReady(os.getpid(), num_threads)))
        try:
            while True:
                readable, _, _ = select.select([self._control, self._wakeup_read], [], [], ORPHAN_CHECK_S)
                if os.getppid() != kernel:
                    break  # a child of the kernel may keep the channel open after the kernel's end
                if self._wakeup_read in readable:
                    with suppress(BlockingIOError):
                        os.read(self._wakeup_read, 512)
                    self._reap()
                if self._control in readable:
                    message, descriptors = self._control.receive()
                    self._handle(decode(message), descriptors)
        except (EOFError, OSError):
            pass
        finally:
            self._end_all()

    def _handle(self, record: object, descriptors: list[int]) -> None:
        if isinstance(record, Fork):
            self._fork(record, descriptors)
        elif isinstance(record, Kill):
            for pid in [pid for pid, rank in self._ranks.items() if rank == record.rank]:
                _kill_group(pid)
        elif isinstance(record, TraceStack):
            for pid in [pid for pid, rank in self._ranks.items() if rank == record.rank]:
                os.kill(pid, TRACE_SIGNAL)
                with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                    state = file.read().rpartition(")")[2].split()[0]
                self._control.send(encode(StackTraced(record.rank, state)))

    def _fork(self, record: Fork, descriptors: list[int]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            for descriptor in descriptors:
                os.close(descriptor)
            self._control.send(encode(ForkFailed(record.rank, str(error))))
            return
        if pid == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                self._control.close()
                os.close(self._wakeup_read)
                os.close(self._wakeup_write)
                code = run_worker(record.start, descriptors, parent=parent)
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                with suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        self._ranks[pid] = record.rank
        for descriptor in descriptors:
            os.close(descriptor)
        self._control.send(encode(Forked(record.rank, pid)))

    def _reap(self) -> None:
        for pid in list(self._ranks):
            # Detect the end without reaping, kill the group, then reap: the process id is not reused before.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            _kill_group(pid)
            _, status = os.waitpid(pid, 0)
            remove_temporary_folder(pid)
            self._control.send(encode(Exited(self._ranks.pop(pid), pid, os.waitstatus_to_exitcode(status))))

    def _end_all(self) -> None:
        for pid in self._ranks:
            _kill_group(pid)
        for pid in self._ranks:
            os.waitpid(pid, 0)
            remove_temporary_folder(pid)


def _kill_group(pid: int) -> None:
    """Send SIGKILL to a worker and the processes that it started; each worker leads its own process group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    Zygote(Channel.from_descriptor(int(sys.argv[1]))).serve(sys.argv[2:])
