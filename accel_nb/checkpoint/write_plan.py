"""Division of a save among the ranks, computed without communication and equally on every rank; imports no torch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from accel_nb.checkpoint.layout import Region, covers_exactly, full_region, tensor_file
from accel_nb.checkpoint.manifest import StoredPiece, TensorRecord
from accel_nb.errors import CheckpointError
from accel_nb.runtime.safetensors_header import DTYPES

MAX_FILE_BYTES = 2 << 30
MIN_SPLIT_BYTES = 64 << 20

Kind = Literal["replicated", "main", "sharded"]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A global tensor to write; ``kind`` states which ranks hold it."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind

    def num_bytes(self, region: Region) -> int:
        """Return the size of a region of the tensor in bytes."""
        return region.size * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True)
class WriteTask:
    """A region of a tensor that one rank writes under ``key`` to ``file``."""

    tensor: TensorPlan
    region: Region
    file: str
    key: str

    @property
    def num_bytes(self) -> int:
        """The size of the region in bytes."""
        return self.tensor.num_bytes(self.region)


@dataclass(frozen=True)
class WritePlan:
    """The tasks of every rank, in the order of the files' contents."""

    tasks: Sequence[Sequence[WriteTask]]

    def records(self) -> dict[str, TensorRecord]:
        """Return the manifest's entries."""
        pieces: dict[str, list[StoredPiece]] = {}
        plans: dict[str, TensorPlan] = {}
        for tasks in self.tasks:
            for task in tasks:
                plans[task.tensor.path] = task.tensor
                pieces.setdefault(task.tensor.path, []).append(StoredPiece(task.file, task.key, task.region))
        return {path: TensorRecord(plan.dtype, plan.shape, tuple(pieces[path])) for path, plan in plans.items()}


def plan_writes(tensors: Sequence[TensorPlan], slices: Sequence[Mapping[str, Region]], suffix: str = "") -> WritePlan:
    """Divide tensors among ``len(slices)`` ranks; ``slices`` holds each rank's shards of the sharded ones, by path.

    Replicated tensors are written once, large ones split along their first dim. Raises `CheckpointError` for sharded
    tensors that the slices do not cover exactly.
    """
    world_size = len(slices)
    shares: list[list[tuple[TensorPlan, Region]]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    split: list[tuple[TensorPlan, Region]] = []
    limit = max(
        MIN_SPLIT_BYTES, sum(t.num_bytes(full_region(t.shape)) for t in tensors if t.kind == "replicated") // world_size
    )
    for tensor in tensors:
        if tensor.kind == "sharded":
            for rank, region in _writers(tensor, slices):
                shares[rank].append((tensor, region))
                loads[rank] += tensor.num_bytes(region)
        elif tensor.kind == "main":
            shares[0].append((tensor, full_region(tensor.shape)))
            loads[0] += tensor.num_bytes(full_region(tensor.shape))
        else:
            split += [(tensor, region) for region in _split(tensor, limit)]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for tensor, region in sorted(split, key=lambda item: -item[0].num_bytes(item[1])):
        load, rank = heapq.heappop(heap)
        shares[rank].append((tensor, region))
        heapq.heappush(heap, (load + tensor.num_bytes(region), rank))
    return WritePlan([_pack(share, rank, world_size, suffix) for rank, share in enumerate(shares)])


def _writers(tensor: TensorPlan, slices: Sequence[Mapping[str, Region]]) -> list[tuple[int, Region]]:
    """Return the parts of a sharded tensor, each with the rank that writes it: the first one that holds it."""
    writers: dict[Region, int] = {}
    for rank, parts in enumerate(slices):
        if tensor.path in parts:
            writers.setdefault(parts[tensor.path], rank)
    nonempty = {region: rank for region, rank in writers.items() if region.size or not math.prod(tensor.shape)}
    if not covers_exactly(nonempty, tensor.shape):
        raise CheckpointError(
            f"{tensor.path}: the parts of all ranks do not cover its global shape {list(tensor.shape)} exactly once"
        )
    return [(rank, region) for region, rank in nonempty.items()]


def _split(tensor: TensorPlan, limit: int) -> list[Region]:
    total = tensor.num_bytes(full_region(tensor.shape))
    if total <= limit or not tensor.shape or tensor.shape[0] < 2:
        return [full_region(tensor.shape)]
    rows = max(1, limit * tensor.shape[0] // total)
    rest = tensor.shape[1:]
    return [
        Region((start, *(0 for _ in rest)), (min(rows, tensor.shape[0] - start), *rest))
        for start in range(0, tensor.shape[0], rows)
    ]


def _pack(share: list[tuple[TensorPlan, Region]], rank: int, world_size: int, suffix: str) -> list[WriteTask]:
    """Assign a rank's regions to files; wide dtypes come first, so that every tensor is aligned to its width."""
    tasks: list[WriteTask] = []
    number, filled = 0, 0
    used = {"__metadata__"}
    for tensor, region in sorted(share, key=lambda item: -DTYPES[item[0].dtype][1]):
        size = tensor.num_bytes(region)
        if filled and filled + size > MAX_FILE_BYTES:
            number, filled = number + 1, 0
        filled += size
        is_whole = region.shape == tensor.shape
        key = tensor.path if is_whole else f"{tensor.path}#{','.join(map(str, region.offsets))}"
        while key in used:
            key += "#"
        used.add(key)
        tasks.append(WriteTask(tensor, region, tensor_file(rank, world_size, number, suffix), key))
    return tasks
