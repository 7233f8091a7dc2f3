"""Filling of tensors from files: directly in host memory, or through page-locked memory to a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import Tensor

from accel_nb.bigmodel.safetensors_reader import CHUNK_BYTES, FileTensor
from accel_nb.runtime.devices.base import Event
from accel_nb.runtime.devices.registry import default_type, device_type
from accel_nb.runtime.process.hardware import num_usable_cores

Job = tuple[FileTensor, Tensor]
"""A tensor in a file, and the contiguous tensor to fill with it, on any device and of any dtype."""

_MAX_READERS = 8


class Staging:
    """Two buffers of one thread for copies from files to devices: one is filled while the other is copied."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._sent: list[Event | None] = [None, None]
        self._turn = 0

    def fill(self, source: FileTensor, out: Tensor) -> None:
        """Read a tensor from its file into ``out``; returns when any stream may use ``out``."""
        if out.is_cpu:
            source.read_into(out)
            return
        flat, kind = out.view(-1), device_type(out.device)
        for begin, part in source.chunks(self._next):
            # Only an event shows the end of a copy, after which the buffer may be filled again.
            flat[begin : begin + part.numel()].copy_(part, non_blocking=kind.has_streams)
            if kind.has_streams:
                self._sent[self._turn] = kind.current_stream(out.device).record_event()
        for event in self._sent:
            if event is not None:
                event.synchronize()

    def _next(self, nbytes: int) -> Tensor:
        """Return a buffer whose copy has ended."""
        if not self._buffers:
            pins = default_type().pins_memory
            self._buffers = [
                torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pins, device="cpu") for _ in range(2)
            ]
        self._turn = 1 - self._turn
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        return self._buffers[self._turn]


def fill_all(jobs: Sequence[Job], on_progress: Callable[[int, int], None] | None = None) -> None:
    """Fill tensors, several at a time, in the order of their files and offsets.

    ``on_progress(done, total)`` is called in the calling thread, in bytes of the files. The first error is raised after
    the reads in progress have ended.
    """
    jobs = sorted(jobs, key=lambda job: (str(job[0].file.path), job[0].offset))
    total, done = sum(source.nbytes for source, _ in jobs), 0
    own = threading.local()

    def fill(job: Job) -> int:
        if not hasattr(own, "staging"):
            own.staging = Staging()
        own.staging.fill(*job)
        return job[0].nbytes

    with ThreadPoolExecutor(min(_MAX_READERS, num_usable_cores()), "accel_nb-load") as pool:
        waiting = [pool.submit(fill, job) for job in jobs]
        try:
            for ready in as_completed(waiting):
                done += ready.result()
                if on_progress is not None:
                    on_progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
