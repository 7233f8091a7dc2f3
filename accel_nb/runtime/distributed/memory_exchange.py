"""Exchange of small host tensors among ranks of one machine, through memory that they share.

gloo sends every message over sockets and wakes several threads for it; for a few bytes that takes ten times as long as
the exchange itself. Here each rank has a counter and two slots of memory. In exchange k a rank copies its bytes to its
slot k mod 2, sets its counter to k, and waits until every counter has reached k; then it reads the slots of all ranks.
A rank writes a slot again in exchange k + 2, when all ranks have begun exchange k + 1 and so have read it.

Writes to memory are visible in program order on x86-64 only; on other processors gloo is used.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import select
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_BYTES = 1 << 20
"""The largest tensor of one rank that is exchanged here."""

_FUTEX_WAIT, _FUTEX_WAKE, _FUTEX_NUMBER = 0, 1, 202  # of Linux on x86-64; see futex(2)
_ALL_WAITERS = 2**31 - 1
_SLICE_NS = 50_000_000
"""Time after which a waiting rank checks whether the other rank still runs."""
_NUM_SPINS = 20
"""Number of reads of a counter before a rank sleeps: a few microseconds."""
_TOKEN_BYTES = 16
_HEADER_BYTES = 4096
_WORDS_PER_RANK = 16  # a line of the processor's cache
_COUNTER, _SIZE, _CODE, _PID, _HAS_LEFT = 0, 1, 3, 5, 6  # sizes and codes have one word for each of the two slots
_MAX_RANKS = (_HEADER_BYTES - _TOKEN_BYTES) // (4 * _WORDS_PER_RANK) - 1
_HALF_RANGE = 1 << 31  # counters wrap around at 2**32: a difference below this is not negative
_MASK = (1 << 32) - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@dataclass(slots=True)
class LastExchange:
    """The last exchange that this rank has begun; the defaults are the values before the first one."""

    operation: str = "none"
    sizes: list[list[int]] = field(default_factory=list[list[int]])
    began_ns: int = 0
    is_open: bool = False


class MemoryExchange:
    """Exchanges tensors among all ranks of a group; every rank must make the same calls in the same order.

    ``path`` is the path that `create_memory` has returned. Only `leave` may be called from another thread while an
    exchange waits.
    """

    def __init__(self, path: str, token: bytes, rank: int, size: int, *, timeout_s: float) -> None:
        """Open the memory; raise OSError if there is none, or it belongs to another group."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != _num_bytes(size) or os.pread(descriptor, _TOKEN_BYTES, 0) != token:
                raise OSError(f"{path} is not the memory of this group")
            self._memory = mmap.mmap(descriptor, _num_bytes(size))
        finally:
            os.close(descriptor)
        self.num_exchanges = 0
        """How many exchanges this rank has begun."""
        self.last = LastExchange()
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._words = (ctypes.c_uint32 * (_HEADER_BYTES // 4)).from_buffer(self._memory)
        # By rank, the index of the first of its words: its counter, sizes, codes and so on.
        self._lines = [_TOKEN_BYTES // 4 + _WORDS_PER_RANK * (1 + other) for other in range(size)]
        self._line = self._lines[rank]
        self._counters = [ctypes.c_void_p(self._address + 4 * (line + _COUNTER)) for line in self._lines]
        self._slice = ctypes.byref(_Timespec(0, _SLICE_NS))
        self._system_call = ctypes.CDLL(None, use_errno=True).syscall
        self._lock = threading.Lock()
        self._others = [other for other in range(size) if other != rank]
        # By rank, the descriptors of the processes that this rank has waited for.
        self._processes: dict[int, int] = {}
        self._words[self._line + _PID] = os.getpid()

    @staticmethod
    def accepts(tensor: Tensor) -> bool:
        """Return whether a tensor can be exchanged: it is small, contiguous and on the host."""
        return (
            tensor.is_cpu
            and type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.numel() * tensor.element_size() <= MAX_BYTES
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; shapes and dtypes must be equal on all ranks."""
        gathered = [torch.empty_like(tensor) for _ in range(self._size)]
        with self._lock:
            slots, num_bytes = self._exchange(tensor, "all_gather", is_source=True)
            for rank, part in enumerate(gathered):
                ctypes.memmove(part.data_ptr(), self._address + slots + rank * MAX_BYTES, num_bytes)
        return gathered

    def all_reduce(self, tensor: Tensor, combine: Callable[[Tensor, Tensor], object]) -> None:
        """Replace ``tensor`` by the reduction of all ranks' tensors, in rank order.

        ``combine`` reduces its first argument and its second one into the first, as `Tensor.add_` does.
        """
        with self._lock:
            slots, num_bytes = self._exchange(tensor, "all_reduce", is_source=True)
            for rank in range(self._size if num_bytes else 0):
                offset = slots + rank * MAX_BYTES
                part = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                (combine if rank else Tensor.copy_)(tensor, part.view(tensor.shape))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return rank ``source``'s tensor; ``tensor`` has the same shape and dtype on the other ranks."""
        received = tensor if self._rank == source else torch.empty_like(tensor)
        with self._lock:
            slots, num_bytes = self._exchange(tensor, "broadcast", is_source=self._rank == source)
            if received is not tensor:
                ctypes.memmove(received.data_ptr(), self._address + slots + source * MAX_BYTES, num_bytes)
        return received

    def leave(self) -> None:
        """Make the waiting and later exchanges of all ranks raise RuntimeError; may be called in any thread."""
        self._words[self._line + _HAS_LEFT] = 1
        for counter in self._counters:
            self._wake(counter)

    def close(self) -> None:
        """Leave, and close the descriptors of the processes of other ranks."""
        self.leave()
        while self._processes:
            os.close(self._processes.popitem()[1])

    def _exchange(self, tensor: Tensor, operation: str, *, is_source: bool) -> tuple[int, int]:
        """Run one exchange; return the offset of rank 0's slot in the memory, and the number of bytes in each."""
        words, line = self._words, self._line
        number = (words[line + _COUNTER] + 1) & _MASK
        slot = number & 1
        slots = _HEADER_BYTES + slot * self._size * MAX_BYTES
        num_bytes = tensor.numel() * tensor.element_size()
        if is_source:
            ctypes.memmove(self._address + slots + self._rank * MAX_BYTES, tensor.data_ptr(), num_bytes)
        code = zlib.crc32(operation.encode())
        words[line + _SIZE + slot], words[line + _CODE + slot] = num_bytes, code
        last = self.last = LastExchange(operation, [list(tensor.shape)], time.time_ns(), is_open=True)
        self.num_exchanges += 1
        words[line + _COUNTER] = number
        self._wake(self._counters[self._rank])
        try:
            for other in self._others:
                self._wait_for(other, number)
        finally:
            last.is_open = False
        for other in self._others:
            peer = self._lines[other]
            if words[peer + _SIZE + slot] != num_bytes or words[peer + _CODE + slot] != code:
                raise RuntimeError(
                    f"rank {self._rank} is in {operation} with {num_bytes} bytes, and rank {other} in another exchange "
                    f"with {words[peer + _SIZE + slot]} bytes; every rank must make the same calls: look for a break "
                    "or a branch that only some ranks take"
                )
        return slots, num_bytes

    def _wait_for(self, other: int, number: int) -> None:
        """Wait until a rank has begun the exchange with this number."""
        words, line, counter = self._words, self._lines[other], self._counters[other]
        for _ in range(_NUM_SPINS):
            if (words[line + _COUNTER] - number) & _MASK < _HALF_RANGE:
                return
        deadline = time.monotonic() + self._timeout_s
        while ((value := words[line + _COUNTER]) - number) & _MASK >= _HALF_RANGE:
            if words[line + _HAS_LEFT] or words[self._line + _HAS_LEFT]:
                raise RuntimeError(f"the exchange of tensors with rank {other} was ended")
            # A signal ends this wait, and its handler runs then.
            self._system_call(_FUTEX_NUMBER, counter, _FUTEX_WAIT, value, self._slice, None, 0)
            if words[line + _COUNTER] != value:
                continue
            if self._has_ended(other):
                raise RuntimeError(f"rank {other} has ended, and this rank waits for it in an exchange of tensors")
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {other} did not come to an exchange of tensors in {self._timeout_s:g} s")

    def _has_ended(self, other: int) -> bool:
        """Return whether the process of a rank has ended; False if the system does not report it."""
        try:
            if other not in self._processes:
                self._processes[other] = os.pidfd_open(self._words[self._lines[other] + _PID])
        except ProcessLookupError:
            return True
        except (OSError, AttributeError):  # a container may forbid it, and builds of Python for older systems lack it
            return False
        poller = select.poll()
        poller.register(self._processes[other], select.POLLIN)
        return bool(poller.poll(0))

    def _wake(self, counter: ctypes.c_void_p) -> None:
        self._system_call(_FUTEX_NUMBER, counter, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)


def is_supported(num_ranks: int) -> bool:
    """Return whether this number of ranks can exchange tensors through memory on this system."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and num_ranks <= _MAX_RANKS


def create_memory(size: int) -> tuple[int, str, bytes]:
    """Create the memory for a group; return its descriptor, the path by which other ranks open it, and its token."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    descriptor = os.memfd_create("accel_nb_exchange", os.MFD_CLOEXEC)
    os.truncate(descriptor, _num_bytes(size))  # the system allocates only what is written
    os.pwrite(descriptor, token, 0)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", token


def _num_bytes(size: int) -> int:
    return _HEADER_BYTES + 2 * size * MAX_BYTES
