"""Saving of checkpoints: blocking, or in the background from a copy of the tensors. One save runs at a time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_nb.checkpoint.discovery import remove_oldest
from accel_nb.checkpoint.layout import write_report_file
from accel_nb.checkpoint.manifest import CheckpointOrigin
from accel_nb.checkpoint.save import (
    ReservedFolder,
    SavePlan,
    WriteReport,
    abandon,
    commit,
    live_buffers,
    plan_save,
    task_tensor,
    write_rank_files,
)
from accel_nb.checkpoint.store import Store
from accel_nb.checkpoint.write_plan import WriteTask
from accel_nb.errors import AccelNbError, CheckpointError
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.communicator import Communicator

REPORT_TIMEOUT_S = 1800.0
MAX_WAIT_S = 2.0
"""The longest acceptable wait of the training for a save in the background."""
_POLL_S = (0.005, 0.2)
_ALIGNMENT = 64


class CheckpointSaver:
    """Saves checkpoints of one world; every rank has one and makes the same calls.

    `save`, `wait` and `close` wait for other ranks. A failure in the background is raised by the next call, on every
    rank.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm = comm
        self._staging = StagingBuffer(device)
        self._job: _Job | None = None
        # Of the last save: bytes on all ranks, and duration on this rank.
        self.num_bytes = 0
        self.last_duration_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a background save of this rank is running."""
        return self._job is not None and not self._job.is_done

    @property
    def is_slow(self) -> bool:
        """Whether a background save is running, and it or the last one takes longer than `MAX_WAIT_S`."""
        return self.is_busy and max(self.last_duration_s, self._job.elapsed_s if self._job else 0.0) > MAX_WAIT_S

    def save(
        self,
        store: Store,
        name: str,
        tree: Any,
        origin: CheckpointOrigin,
        *,
        blocking: bool = True,
        keep: int | None = None,
        reserved: ReservedFolder | None = None,
        may_replace: bool = False,
    ) -> str:
        """Write ``tree`` as the checkpoint ``name`` and return its URL.

        ``keep`` is the number of checkpoints of this run to retain; ``reserved`` is the result of `reserve_folder`, if
        it was called; with ``may_replace`` a checkpoint of another run with this name is replaced. With
        ``blocking=False`` it returns once the tensors are copied. Raises `CheckpointError` for this save, or for the
        previous one.
        """
        self.wait()
        started = time.monotonic()
        plan = plan_save(store, name, tree, origin, self._comm, reserved, may_replace=may_replace)
        finish = _Finish(plan, keep)
        self.num_bytes = sum(task.num_bytes for tasks in plan.writes.tasks for task in tasks)
        if not blocking:
            staged: dict[int, memoryview] | str
            try:
                staged = self._staging.copy(plan)
            except Exception as error:  # reported by the job, since the other ranks continue
                staged = f"{type(error).__name__}: {error}"
            self._job = _Job(plan, staged, self._comm.world.size, finish, started)
            return plan.url
        try:
            part = write_rank_files(plan, lambda tasks: live_buffers(plan.leaves, tasks))
            parts = self._comm.all_gather_json(part)
        except BaseException:  # an interrupt, or the death of a rank
            if self._comm.world.is_main:
                abandon(plan)
            raise
        problem = finish(parts) if self._comm.world.is_main else None
        _raise(self._comm.broadcast_json(problem))
        self.last_duration_s = time.monotonic() - started
        return plan.url

    def wait(self) -> None:
        """Wait for the save in the background; raises `CheckpointError` on every rank if it failed on one."""
        if self._job is None:  # on every rank then
            return
        job, is_main = self._job, self._comm.world.is_main
        # The other ranks first: one whose store is full cannot write the report that rank 0 waits for.
        problems = self._comm.all_gather_json(None if is_main else job.join())
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
        if is_main and failed:
            job.cancel(failed[0])
        problem = job.join() if is_main else None
        self.last_duration_s = job.elapsed_s
        self._job = None
        _raise(self._comm.broadcast_json(problem))

    def abort(self) -> None:
        """Cancel the background save, without the other ranks, and remove its files."""
        if self._job is not None:
            self._job.cancel("it was aborted")
            self._job.join()
            self._job = None

    def close_alone(self) -> None:
        """Close without the other ranks, since some may have ended; cancel a save that takes over `MAX_WAIT_S`."""
        if self._job is not None:
            self._job.join(MAX_WAIT_S)
        self.abort()
        self._staging.free()

    def close(self) -> None:
        """Wait for the background save, raise if it failed, and free the copy."""
        try:
            self.wait()
        except CheckpointError:
            raise
        except BaseException:  # the other ranks cannot be reached
            self.abort()
            raise
        finally:
            self._staging.free()


class StagingBuffer:
    """A buffer reused for each save: copying to memory that is mapped already is several times faster than cloning."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: Tensor | None = None

    def copy(self, plan: SavePlan) -> dict[int, memoryview]:
        """Copy the tensors that this rank writes, and return each task's bytes by the task's id."""
        places, end = [], 0
        for task in plan.tasks:
            places.append(end)
            end += -(-task.num_bytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._allocate(end)
        staged: dict[int, memoryview] = {}
        with torch.no_grad():
            for task, start in zip(plan.tasks, places, strict=True):
                source = task_tensor(plan.leaves[task.tensor.path], task)
                flat = buffer[start : start + task.num_bytes]
                if source.numel():
                    flat.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
                staged[id(task)] = memoryview(flat.numpy())  # pyright: ignore[reportArgumentType]
        kind = device_type(self._device)
        if kind.has_streams:
            kind.current_stream(self._device).synchronize()
        plan.leaves.clear()  # the background job must not reference the model
        return staged

    def free(self) -> None:
        """Free the memory."""
        self._buffer = None

    def _allocate(self, num_bytes: int) -> Tensor:
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._buffer = None  # freed first, so that the two do not coexist
            self._buffer = torch.empty(
                num_bytes, dtype=torch.uint8, pin_memory=device_type(self._device).pins_memory, device="cpu"
            )
        return self._buffer


class _Finish:
    """A function that completes the save on rank 0 once all ranks have reported; it returns a problem as text."""

    def __init__(self, plan: SavePlan, keep: int | None) -> None:
        self._plan = plan
        self._keep = keep

    def __call__(self, parts: Sequence[WriteReport]) -> str | None:
        plan = self._plan
        try:
            commit(plan, parts)
        except CheckpointError as error:
            return str(error)
        try:
            if not plan.may_replace:  # not beside a folder that the user has named: scripts list the folders there
                plan.store.write_latest(plan.name)
            if self._keep is not None:
                remove_oldest(plan.store, plan.origin.run, self._keep, newest=plan.name)
        except (AccelNbError, OSError) as error:
            return f"{plan.url} is saved and complete, but updating latest or removing old checkpoints failed: {error}"
        return None


class _Job:
    """The background save of one rank.

    Ranks report to rank 0 through small files in the store, not through collectives, which the training uses meanwhile.
    """

    def __init__(
        self,
        plan: SavePlan,
        staged: dict[int, memoryview] | str,
        world_size: int,
        finish: Callable[[Sequence[WriteReport]], str | None],
        started: float,
    ) -> None:
        self._plan = plan
        self._staged = staged
        self._world_size = world_size
        self._finish = finish
        self._started = started
        self._ended: float | None = None
        self._problem: str | None = None
        self._is_cancelled = threading.Event()
        self._reason = ""
        # Not a daemon: a program that ends right after a save keeps the checkpoint.
        self._thread = threading.Thread(target=self._run, name="accel_nb-checkpoint")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def elapsed_s(self) -> float:
        """The duration so far, or in total once it has ended."""
        return (self._ended or time.monotonic()) - self._started

    def join(self, timeout_s: float | None = None) -> str | None:
        """Wait, and return the problem, if any."""
        self._thread.join(timeout_s)
        return self._problem

    def cancel(self, reason: str) -> None:
        """Cancel the save; its files are removed unless the checkpoint is complete already."""
        self._reason = reason
        self._is_cancelled.set()

    def _run(self) -> None:
        try:
            self._problem = self._save()
        except Exception as error:  # raised by the next call
            self._problem = f"{self._plan.url} was not saved: {type(error).__name__}: {error}"
        self._ended = time.monotonic()

    def _save(self) -> str | None:
        plan = self._plan
        part = {"problem": self._staged} if isinstance(self._staged, str) else write_rank_files(plan, self._buffers)
        if plan.rank > 0:
            plan.store.write_atomically(
                plan.folder, write_report_file(plan.rank, plan.suffix), json.dumps(part).encode()
            )
            return part.get("problem")
        parts = [part]
        names = [write_report_file(rank, plan.suffix) for rank in range(1, self._world_size)]
        for rank, name in enumerate(names, 1):
            parts.append(self._await_report(rank, name) if "problem" not in part else {"problem": "rank 0 failed"})
        plan.store.remove_files(plan.folder, names)
        return self._finish(parts)

    def _buffers(self, tasks: Sequence[WriteTask]) -> Iterator[memoryview]:
        assert not isinstance(self._staged, str), "there is nothing to write"
        for task in tasks:
            if self._is_cancelled.is_set():
                raise CheckpointError(self._reason)
            yield self._staged[id(task)]

    def _await_report(self, rank: int, name: str) -> WriteReport:
        pause, last = _POLL_S
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        while not self._is_cancelled.is_set():
            if self._plan.store.exists(self._plan.folder, name):
                return json.loads(self._plan.store.read(self._plan.folder, name, 1 << 28))
            if time.monotonic() > deadline:
                return {"problem": f"rank {rank} did not finish writing within {REPORT_TIMEOUT_S:.0f} s"}
            self._is_cancelled.wait(pause)
            pause = min(2 * pause, last)
        return {"problem": self._reason}


def _raise(problem: str | None) -> None:
    if problem is not None:
        raise CheckpointError(problem)
