"""Writing of checkpoints: every rank writes its own files; rank 0 completes the checkpoint with the manifest."""

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

from accel_nb.checkpoint.encoding import (
    DTYPE_NAMES,
    EncodedState,
    FromRankZero,
    Slice,
    StateLeaf,
    encode,
    lacks_memory,
    leaf_region,
    leaf_tensor,
)
from accel_nb.checkpoint.layout import MANIFEST, MAX_JSON_BYTES, Region, checked_name, state_file
from accel_nb.checkpoint.manifest import (
    CHUNK_BYTES,
    CheckpointOrigin,
    FileRecord,
    Manifest,
    incremental_checksum,
    make_file_record,
    read_manifest,
)
from accel_nb.checkpoint.store import Store
from accel_nb.checkpoint.write_plan import TensorPlan, WritePlan, WriteTask, plan_writes
from accel_nb.errors import AccelNbError, CheckpointError, CorruptCheckpoint
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.safetensors_header import encode_header

logger = logging.getLogger(__name__)

MISSING_RANKS_WARNING_S = 10.0
_SMALL_BYTES = 1 << 20

WriteReport = dict[str, Any]
"""A rank's report of its writes as JSON: ``files`` with sizes and checksums, or ``problem``."""


@dataclass(frozen=True)
class SavePlan:
    """The plan of one save, on which all ranks have agreed."""

    store: Store
    name: str
    folder: str
    save_id: str
    origin: CheckpointOrigin
    state: bytes
    writes: WritePlan
    leaves: dict[str, StateLeaf]
    rank: int
    suffix: str
    may_replace: bool = False

    @property
    def tasks(self) -> Sequence[WriteTask]:
        """The tensors that this rank writes."""
        return self.writes.tasks[self.rank]

    @property
    def url(self) -> str:
        """The URL of the checkpoint once it is complete."""
        return f"{self.store.url}/{self.name}"


@dataclass(frozen=True)
class ReservedFolder:
    """A temporary folder reserved for a checkpoint whose content is not known yet."""

    save_id: str
    folder: str


def reserve_folder(
    store: Store, name: str, run: str, comm: Communicator, *, may_replace: bool = False
) -> ReservedFolder:
    """Create the folder of a checkpoint, which others can write to before `plan_save`; every rank must call.

    Raises `CheckpointError` on every rank, as `plan_save` does. Release it with ``store.discard`` if it is not used.
    """
    reserved: ReservedFolder | None = None
    problem: str | None = None
    if comm.world.is_main:
        try:
            reserved = _begin(store, name, run, may_replace)
        except (AccelNbError, OSError) as error:
            problem = str(error)
    with _warn_if_alone(comm, name):
        sent = comm.all_gather_json([None if reserved is None else [reserved.save_id, reserved.folder], problem])[0]
    if sent[1] is not None:
        raise CheckpointError(f"{name} was not saved; rank 0: {sent[1]}")
    return ReservedFolder(*sent[0])


def _begin(store: Store, name: str, run: str, may_replace: bool) -> ReservedFolder:
    checked_name(name)
    save_id = uuid.uuid4().hex[:12]
    check_name_is_free(store, name, run, may_replace=may_replace)
    store.remove_stale()
    return ReservedFolder(save_id, store.begin(name, save_id))


def plan_save(
    store: Store,
    name: str,
    tree: Any,
    origin: CheckpointOrigin,
    comm: Communicator,
    reserved: ReservedFolder | None = None,
    *,
    may_replace: bool = False,
) -> SavePlan:
    """Agree with all ranks on the files that each writes; every rank must call.

    ``reserved`` is the result of `reserve_folder`, if it was called. With ``may_replace`` a checkpoint of another run
    with this name is replaced.

    Raises `CheckpointError` on every rank for values that cannot be stored, trees that differ between ranks, and a name
    in use by anything that this run has not written.
    """
    rank, world_size = comm.world.rank, comm.world.size
    encoded, problem = EncodedState(), None
    try:
        checked_name(name)
        if world_size > 1 and not store.is_shared:
            raise CheckpointError(f"{store.url}: each process has a store of its own there; ranks cannot share it")
        encoded = encode(tree)
        _require_memory(encoded)
        if rank == 0 and reserved is None:
            reserved = _begin(store, name, origin.run, may_replace)
    except (AccelNbError, OSError) as error:
        problem = str(error)
    plans = [_plan(path, leaf) for path, leaf in encoded.leaves.items()]
    parts = {path: leaf_region(leaf)[0] for path, leaf in encoded.leaves.items() if isinstance(leaf, Slice)}
    message = {
        "problem": problem,
        "tensors": hashlib.blake2b(
            json.dumps([_plan_as_list(plan) for plan in plans]).encode(), digest_size=16
        ).hexdigest(),
        "parts": {path: [region.offsets, region.shape] for path, region in parts.items()},
        "id": "" if reserved is None else reserved.save_id,
        "folder": "" if reserved is None else reserved.folder,
    }
    try:
        with _warn_if_alone(comm, name):
            messages = comm.all_gather_json(message)
        save_id, folder = messages[0]["id"], messages[0]["folder"]
        suffix = "" if store.supports_rename else f"-{save_id}"
        for other, received in enumerate(messages):
            if received["problem"] is not None:
                raise CheckpointError(f"{name} was not saved; rank {other}: {received['problem']}")
            if received["tensors"] != messages[0]["tensors"]:
                raise CheckpointError(
                    f"{name} was not saved: rank {other} holds other tensors than rank 0 (names, dtypes or shapes); "
                    "every rank must prepare and register the same objects"
                )
        slices = [
            {path: Region(tuple(offsets), tuple(shape)) for path, (offsets, shape) in received["parts"].items()}
            for received in messages
        ]
        writes = plan_writes(plans, slices, suffix)
    except BaseException:  # also an interrupt
        if rank == 0 and reserved is not None:
            store.discard(reserved.folder, ())
        raise
    state = encoded.to_bytes() if rank == 0 else b""
    return SavePlan(store, name, folder, save_id, origin, state, writes, encoded.leaves, rank, suffix, may_replace)


@contextmanager
def _warn_if_alone(comm: Communicator, name: str) -> Iterator[None]:
    """Warn if the block, which waits for all ranks, takes long: a common mistake is a save on rank 0 only."""
    if comm.world.size == 1:
        yield
        return
    timer = threading.Timer(
        MISSING_RANKS_WARNING_S,
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


def check_name_is_free(store: Store, name: str, run: str, *, may_replace: bool = False) -> None:
    """Raise `CheckpointError` if ``name`` exists and is not a checkpoint of this run, unless ``may_replace``."""
    if name not in store.folders():
        return
    files = store.files(name)
    if MANIFEST not in files:
        # Without rename, the folder may hold files of another save, complete or not; file names are unique to a save.
        if files and store.supports_rename:
            raise CheckpointError(
                f"{store.url}/{name} exists and is not a checkpoint; it is not changed. Give another folder"
            )
        return
    try:
        found = read_manifest(store.read(name, MANIFEST, MAX_JSON_BYTES), f"{store.url}/{name}/{MANIFEST}")
    except CorruptCheckpoint:
        return
    if found.origin.run != run and not may_replace:
        raise CheckpointError(
            f"{store.url}/{name} was written by another run ({found.origin.run}, {found.origin.created}); it is not "
            "changed. Give another folder, or load from this one to continue that run"
        )


def write_rank_files(plan: SavePlan, buffers: Callable[[Sequence[WriteTask]], Iterator[memoryview]]) -> WriteReport:
    """Write this rank's files and return the report for rank 0; an error is reported, not raised.

    ``buffers(tasks)`` yields the bytes of the tasks of one file, in order.
    """
    files: dict[str, Any] = {}
    try:
        for file, group in groupby(plan.tasks, key=lambda task: task.file):
            tasks = list(group)
            header = encode_header({task.key: (task.tensor.dtype, task.region.shape, task.num_bytes) for task in tasks})
            with _ChunkChecksums() as sums:
                content = _join_small([memoryview(header)], buffers(tasks))
                plan.store.write(plan.folder, file, sums.update(content))
                files[file] = [sums.size, sums.values()]
        if plan.rank == 0:
            name = state_file(plan.suffix)
            plan.store.write(plan.folder, name, [plan.state])
            record = make_file_record(plan.state)
            files[name] = [record.size, list(record.checksums)]
    except Exception as error:  # raised on every rank, since the others wait for the report
        return {"problem": f"{type(error).__name__}: {error}"}
    return {"files": files}


def commit(plan: SavePlan, parts: Sequence[WriteReport]) -> Manifest:
    """Complete the checkpoint; rank 0 only. Raises `CheckpointError` after removal of all its files."""
    try:
        for rank, part in enumerate(parts):
            if "problem" in part:
                raise CheckpointError(f"{plan.url} was not saved; rank {rank}: {part['problem']}")
        files = {name: FileRecord(size, tuple(sums)) for part in parts for name, (size, sums) in part["files"].items()}
        for name, record in files.items():
            size = plan.store.size(plan.folder, name)
            if size != record.size:
                raise CheckpointError(f"{plan.url} was not saved: {name} has {size} bytes instead of {record.size}")
        # Checked again, since another job may have written the name meanwhile.
        check_name_is_free(plan.store, plan.name, plan.origin.run, may_replace=plan.may_replace)
        manifest = Manifest(plan.save_id, plan.origin, state_file(plan.suffix), files, plan.writes.records())
        plan.store.commit(plan.folder, plan.name, plan.save_id, manifest.to_bytes())
    except CorruptCheckpoint as error:
        abandon(plan)
        raise CheckpointError(
            f"{plan.url} was not saved: rank 0 does not find a file of another rank ({error})"
        ) from error
    except OSError as error:
        abandon(plan)
        raise CheckpointError(f"{plan.url} was not saved: {error}") from error
    except CheckpointError:
        abandon(plan)
        raise
    return manifest


def abandon(plan: SavePlan) -> None:
    """Remove the files of a checkpoint that is not completed; rank 0 only."""
    files = {task.file for tasks in plan.writes.tasks for task in tasks}
    with suppress(AccelNbError, OSError):  # files that cannot be removed are ignored by readers: no manifest lists them
        plan.store.discard(plan.folder, (*files, state_file(plan.suffix)))


def live_buffers(leaves: dict[str, StateLeaf], tasks: Iterable[WriteTask]) -> Iterator[memoryview]:
    """Yield the bytes of the tensors themselves, not of copies; training must not continue meanwhile."""
    for task in tasks:
        yield as_bytes(task_tensor(leaves[task.tensor.path], task))


def task_tensor(leaf: StateLeaf, task: WriteTask) -> Tensor:
    """Return the part of this rank's tensor that a task writes, as a view."""
    tensor = leaf_tensor(leaf).detach()
    if isinstance(leaf, Slice) or task.region.shape == task.tensor.shape:
        return tensor
    return tensor.narrow(0, task.region.offsets[0], task.region.shape[0])


def as_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes on the CPU; a view if it is contiguous and on the CPU."""
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def _require_memory(encoded: EncodedState) -> None:
    """Raise `CheckpointError` for a tensor whose bytes cannot be written, such as a quantized one of torchao."""
    for path, leaf in encoded.leaves.items():
        tensor = leaf_tensor(leaf)
        if device_type(tensor.device).has_addresses and lacks_memory(tensor):
            raise CheckpointError(
                f"{path} cannot be stored: this {type(tensor).__module__}.{type(tensor).__qualname__} on "
                f"{tensor.device} has no memory of its own. Convert it to a plain tensor, or remove it from the "
                "weights in a hook of register_save_state_pre_hook"
            )


def _plan(path: str, leaf: StateLeaf) -> TensorPlan:
    kind = "sharded" if isinstance(leaf, Slice) else "main" if isinstance(leaf, FromRankZero) else "replicated"
    return TensorPlan(path, DTYPE_NAMES[leaf_tensor(leaf).dtype], leaf_region(leaf)[1], kind)


def _plan_as_list(plan: TensorPlan) -> list[Any]:
    return [plan.path, plan.dtype, plan.shape, plan.kind]


def _join_small(*sources: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield all bytes; small buffers are joined, large ones yielded without a copy."""
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


class _ChunkChecksums:
    """Computes the checksums of a file in a second thread while it is written."""

    def __init__(self) -> None:
        self.size = 0
        self._finished: list[int] = []
        self._current = incremental_checksum()
        self._pool = ThreadPoolExecutor(1, "accel_nb-checksums")
        self._last: Future[None] | None = None

    def __enter__(self) -> _ChunkChecksums:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def update(self, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the bytes, divided at the ends of chunks, and add them to the checksums."""
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
            self._last.result()  # the pool has one thread, so all earlier ones are done too
        return self._finished + ([self._current.intdigest()] if self.size % CHUNK_BYTES else [])

    def _add(self, piece: memoryview, is_end: bool) -> None:
        self._current.update(piece)
        if is_end:
            self._finished.append(self._current.intdigest())
            self._current.reset()
