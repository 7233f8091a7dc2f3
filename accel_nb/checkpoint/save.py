"""Writing: every rank its own files at the same time; complete only when rank 0 has committed the manifest."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from accel_nb.checkpoint.encoding import DTYPE_NAMES, Encoded, FromMain, Leaf, Slice, encode, region_of, tensor_of
from accel_nb.checkpoint.layout import MANIFEST, MAX_JSON_BYTES, Region, checked_name, state_file
from accel_nb.checkpoint.manifest import (
    CHUNK_BYTES,
    Facts,
    FileRecord,
    Manifest,
    read_manifest,
    record_of,
    running_checksum,
)
from accel_nb.checkpoint.store import Store
from accel_nb.checkpoint.write_plan import Task, TensorPlan, WritePlan, plan_writes
from accel_nb.errors import AccelNbError, CheckpointError, CorruptCheckpoint
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.safetensors_header import encode_header

logger = logging.getLogger(__name__)

ALONE_AFTER_S = 10.0
_SMALL_BYTES = 1 << 20

Part = dict[str, Any]
"""What a rank says of its share as JSON: ``files`` with size and checksums, or ``problem``."""


@dataclass(frozen=True)
class Draft:
    """One checkpoint that every rank has agreed to write."""

    store: Store
    name: str
    folder: str
    save_id: str
    facts: Facts
    state: bytes
    plan: WritePlan
    leaves: dict[str, Leaf]
    rank: int
    suffix: str
    may_replace: bool = False

    @property
    def tasks(self) -> Sequence[Task]:
        """What this rank writes."""
        return self.plan.tasks[self.rank]

    @property
    def url(self) -> str:
        """Where the checkpoint will be."""
        return f"{self.store.url}/{self.name}"


@dataclass(frozen=True)
class Place:
    """The folder aside that a checkpoint is written to, before it is known what is in it."""

    save_id: str
    folder: str


def reserve(store: Store, name: str, run: str, comm: Communicator, *, may_replace: bool = False) -> Place:
    """Make the folder of a checkpoint, for others to write to as well; every rank calls, and `draft` goes on with it.

    Raises `CheckpointError` on every rank, as `draft` does. Give it back by ``store.discard`` if nothing comes of it.
    """
    place: Place | None = None
    problem: str | None = None
    if comm.world.is_main:
        try:
            place = _begin(store, name, run, may_replace)
        except (AccelNbError, OSError) as error:
            problem = str(error)
    with _says_when_alone(comm, name):
        told = comm.all_gather_json([None if place is None else [place.save_id, place.folder], problem])[0]
    if told[1] is not None:
        raise CheckpointError(f"{name} was not saved; rank 0: {told[1]}")
    return Place(*told[0])


def _begin(store: Store, name: str, run: str, may_replace: bool) -> Place:
    checked_name(name)
    save_id = uuid.uuid4().hex[:12]
    refuse_foreign(store, name, run, may_replace=may_replace)
    store.sweep()
    return Place(save_id, store.begin(name, save_id))


def draft(
    store: Store,
    name: str,
    tree: Any,
    facts: Facts,
    comm: Communicator,
    place: Place | None = None,
    *,
    may_replace: bool = False,
) -> Draft:
    """Agree with all ranks on what is written by whom; every rank calls, and raises if one of them cannot.

    ``place`` is what `reserve` returned, where it was called before. With ``may_replace`` a checkpoint of another run
    that has the name gives way.

    Raises `CheckpointError` for values that cannot be stored, trees that differ between ranks, and a name that is taken
    by something that this run has not written.
    """
    rank, world_size = comm.world.rank, comm.world.size
    encoded, problem = Encoded(), None
    try:
        checked_name(name)
        if world_size > 1 and not store.is_shared:
            raise CheckpointError(f"{store.url}: each process has a store of its own there; ranks cannot share it")
        encoded = encode(tree)
        if rank == 0 and place is None:
            place = _begin(store, name, facts.run, may_replace)
    except (AccelNbError, OSError) as error:
        problem = str(error)
    plans = [_plan(path, leaf) for path, leaf in encoded.leaves.items()]
    parts = {path: region_of(leaf)[0] for path, leaf in encoded.leaves.items() if isinstance(leaf, Slice)}
    message = {
        "problem": problem,
        "tensors": hashlib.blake2b(json.dumps([_fields(plan) for plan in plans]).encode(), digest_size=16).hexdigest(),
        "parts": {path: [region.offsets, region.shape] for path, region in parts.items()},
        "id": "" if place is None else place.save_id,
        "folder": "" if place is None else place.folder,
    }
    with _says_when_alone(comm, name):
        told = comm.all_gather_json(message)
    save_id, folder = told[0]["id"], told[0]["folder"]
    suffix = "" if store.renames else f"-{save_id}"
    try:
        for other, said in enumerate(told):
            if said["problem"] is not None:
                raise CheckpointError(f"{name} was not saved; rank {other}: {said['problem']}")
            if said["tensors"] != told[0]["tensors"]:
                raise CheckpointError(
                    f"{name} was not saved: rank {other} holds other tensors than rank 0 (names, dtypes or shapes); "
                    "every rank must prepare and register the same objects"
                )
        slices = [
            {path: Region(tuple(offsets), tuple(shape)) for path, (offsets, shape) in said["parts"].items()}
            for said in told
        ]
        plan = plan_writes(plans, slices, suffix)
    except CheckpointError:
        if rank == 0 and folder:
            store.discard(folder, ())
        raise
    state = encoded.text() if rank == 0 else b""
    return Draft(store, name, folder, save_id, facts, state, plan, encoded.leaves, rank, suffix, may_replace)


@contextmanager
def _says_when_alone(comm: Communicator, name: str) -> Iterator[None]:
    """Warn if the block, which waits for all ranks, takes long: the classic mistake is to save on rank 0 only."""
    if comm.world.size == 1:
        yield
        return
    timer = threading.Timer(
        ALONE_AFTER_S,
        logger.warning,
        (
            "rank %d waits for the other ranks to save %s: every rank must call save_state, not the main one alone",
            comm.world.rank,
            name,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def refuse_foreign(store: Store, name: str, run: str, *, may_replace: bool = False) -> None:
    """Raise `CheckpointError` if ``name`` is taken by anything but a checkpoint of the same run, or ``may_replace``."""
    if name not in store.folders():
        return
    files = store.files(name)
    if MANIFEST not in files:
        # Without a rename, what a dead or a living save has sent lies there; its files have names of their own.
        if files and store.renames:
            raise CheckpointError(
                f"{store.url}/{name} exists and is no checkpoint; it is left as it is. Give another folder"
            )
        return
    try:
        found = read_manifest(store.read(name, MANIFEST, MAX_JSON_BYTES), f"{store.url}/{name}/{MANIFEST}")
    except CorruptCheckpoint:
        return
    if found.facts.run != run and not may_replace:
        raise CheckpointError(
            f"{store.url}/{name} was written by another run ({found.facts.run}, {found.facts.created}); it is left "
            "as it is. Give another folder, or load from this one to go on with that run"
        )


def write_share(draft: Draft, buffers: Callable[[Sequence[Task]], Iterator[memoryview]]) -> Part:
    """Write this rank's files and return what to tell rank 0; a failure is told, not raised.

    ``buffers`` gives the bytes of the tasks of one file, in order.
    """
    files: dict[str, Any] = {}
    try:
        for file, group in groupby(draft.tasks, key=lambda task: task.file):
            tasks = list(group)
            header = encode_header({task.key: (task.tensor.dtype, task.region.shape, task.num_bytes) for task in tasks})
            with _Sums() as sums:
                content = _joined([memoryview(header)], buffers(tasks))
                draft.store.write(draft.folder, file, sums.over(content))
                files[file] = [sums.size, sums.values()]
        if draft.rank == 0:
            name = state_file(draft.suffix)
            draft.store.write(draft.folder, name, [draft.state])
            record = record_of(draft.state)
            files[name] = [record.size, list(record.checksums)]
    except (AccelNbError, OSError, RuntimeError) as error:
        return {"problem": f"{type(error).__name__}: {error}"}
    return {"files": files}


def commit(draft: Draft, parts: Sequence[Part]) -> Manifest:
    """Make the checkpoint complete; rank 0 only. Raises `CheckpointError`, after which nothing of it is left."""
    try:
        for rank, part in enumerate(parts):
            if "problem" in part:
                raise CheckpointError(f"{draft.url} was not saved; rank {rank}: {part['problem']}")
        files = {name: FileRecord(size, tuple(sums)) for part in parts for name, (size, sums) in part["files"].items()}
        for name, record in files.items():
            size = draft.store.size(draft.folder, name)
            if size != record.size:
                raise CheckpointError(f"{draft.url} was not saved: {name} has {size} bytes instead of {record.size}")
        # Again: another job may have been faster.
        refuse_foreign(draft.store, draft.name, draft.facts.run, may_replace=draft.may_replace)
        manifest = Manifest(draft.save_id, draft.facts, state_file(draft.suffix), files, draft.plan.records())
        draft.store.commit(draft.folder, draft.name, draft.save_id, manifest.to_bytes())
    except CorruptCheckpoint as error:
        abandon(draft)
        raise CheckpointError(
            f"{draft.url} was not saved: rank 0 does not see a file of another rank ({error})"
        ) from error
    except OSError as error:
        abandon(draft)
        raise CheckpointError(f"{draft.url} was not saved: {error}") from error
    except CheckpointError:
        abandon(draft)
        raise
    return manifest


def abandon(draft: Draft) -> None:
    """Remove what was written of a checkpoint that is not to be; rank 0 only."""
    files = {task.file for tasks in draft.plan.tasks for task in tasks}
    with suppress(AccelNbError, OSError):  # on a store that fails it stays: nothing lists it
        draft.store.discard(draft.folder, (*files, state_file(draft.suffix)))


def live_buffers(leaves: dict[str, Leaf], tasks: Iterable[Task]) -> Iterator[memoryview]:
    """Yield the bytes of tensors as they are now; training must not go on meanwhile."""
    for task in tasks:
        yield as_bytes(part_of(leaves[task.tensor.path], task))


def part_of(leaf: Leaf, task: Task) -> Tensor:
    """Return what a task writes of the tensor that this rank holds: a view."""
    tensor = tensor_of(leaf).detach()
    if isinstance(leaf, Slice) or task.region.shape == task.tensor.shape:
        return tensor
    return tensor.narrow(0, task.region.offsets[0], task.region.shape[0])


def as_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes on the CPU; a view where it is there already, and contiguous."""
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def _plan(path: str, leaf: Leaf) -> TensorPlan:
    kind = "sharded" if isinstance(leaf, Slice) else "main" if isinstance(leaf, FromMain) else "replicated"
    return TensorPlan(path, DTYPE_NAMES[tensor_of(leaf).dtype], region_of(leaf)[1], kind)


def _fields(plan: TensorPlan) -> list[Any]:
    return [plan.path, plan.dtype, plan.shape, plan.kind]


def _joined(*sources: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield all bytes; small buffers are joined, large ones passed on without a copy."""
    pending = bytearray()
    for source in sources:
        for buffer in source:
            if len(buffer) < _SMALL_BYTES:
                pending += buffer
            if pending and (len(buffer) >= _SMALL_BYTES or len(pending) >= _SMALL_BYTES):
                yield memoryview(pending)
                pending = bytearray()
            if len(buffer) >= _SMALL_BYTES:
                yield buffer
    if pending:
        yield memoryview(pending)


class _Sums:
    """Checksums of a file on its way to a store, worked out by a second thread while it is written."""

    def __init__(self) -> None:
        self.size = 0
        self._done: list[int] = []
        self._open = running_checksum()
        self._pool = ThreadPoolExecutor(1, "accel_nb-checksums")
        self._last: Future[None] | None = None

    def __enter__(self) -> _Sums:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def over(self, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        """Pass bytes on, cut so that no piece reaches over the end of a chunk."""
        for buffer in buffers:
            view = buffer
            while view:
                room = CHUNK_BYTES - self.size % CHUNK_BYTES
                piece, view = view[:room], view[room:]
                self.size += len(piece)
                self._last = self._pool.submit(self._add, piece, len(piece) == room)
                yield piece

    def values(self) -> list[int]:
        """Return the checksum of each chunk."""
        if self._last is not None:
            self._last.result()  # one thread: all before it are done too
        return self._done + ([self._open.intdigest()] if self.size % CHUNK_BYTES else [])

    def _add(self, piece: memoryview, is_end: bool) -> None:
        self._open.update(piece)
        if is_end:
            self._done.append(self._open.intdigest())
            self._open.reset()
