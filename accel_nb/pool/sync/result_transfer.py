"""The return of a cell's results: rank 0 detects and packs the changes, the kernel applies them.

The whole value of a name is returned if the cell has bound it: the value is another object than before the cell, or
the name is new. Before a cell the kernel deletes on the workers the names that the notebook has rebound or deleted
(`SharedObjectRegistry`): so a name that exists after the cell was either unchanged or bound by it, however it was
written. Python may share one object among equal numbers or strings: for these a name that the cell's code binds is
returned too, unless the notebook has sent it. If the notebook has sent a name and its object is the same as before, the
changes of that object are returned and applied in place. If the cell has deleted such a name, the notebook deletes it
too. All other names stay on the workers.

Weights of modules are copied through a memory region that is reused in later cells; everything else is a
`NamespaceDelta`. Values that are large or cannot be copied stay on the workers and are reported with the reason.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from accel_nb.errors import error_text
from accel_nb.pool.payload import (
    BufferPayload,
    Payload,
    PayloadFactory,
    Payloads,
    RegionPayload,
    close_all,
    find_payload,
)
from accel_nb.pool.sync.change_detection import (
    TensorChecksums,
    module_flags,
    module_tensors,
    set_module_state,
)
from accel_nb.pool.sync.contents.object_states import ObjectState, unsent_attributes
from accel_nb.pool.sync.namespace_snapshot import NamespaceSnapshot
from accel_nb.pool.sync.namespace_sync import Namespace, NamespaceDelta, describe_failures
from accel_nb.pool.sync.objects.object_kinds import (
    set_attributes,
)
from accel_nb.pool.sync.objects.shared_ids import SharedObjects
from accel_nb.pool.sync.paths.items_before import ItemsBefore
from accel_nb.pool.sync.paths.object_paths import is_at_or_below, resolve_path, root_name
from accel_nb.pool.sync.result_collection import ResultCollection, ReturnedWeights
from accel_nb.pool.sync.stream.sections import SectionError
from accel_nb.runtime.distributed.sharded import full_shape, full_tensor

_ALIGN = 64


CHANGES = "changes"
"""Name of the payload that holds the changes of a namespace, in either direction."""
WEIGHTS = "weights"
"""Name of the region that holds returned weights."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One returned tensor: its path in the module, and the offset of its bytes in the region."""

    path: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightTable:
    """The returned state of one module."""

    entries: tuple[TensorEntry, ...]
    frozen: list[str]
    """Parameters that require no gradient."""
    in_eval_mode: list[str]
    """Submodules in evaluation mode."""
    checksums: TensorChecksums | None = None
    """The checksums of all tensors, as the kernel computes them to find later changes; None of sharded ones."""


@dataclass(frozen=True, slots=True)
class ReturnRecord:
    """The record that rank 0 returns after a cell, with the payloads."""

    not_returned: dict[str, str]
    """By path, why a value stays on the workers; an empty reason is not shown."""
    rng: str | None
    """The digest of rank 0's generator states."""
    weights: dict[str, WeightTable]
    """The modules in the region, by path."""
    replaced: list[str] = field(default_factory=list[str])
    """Models and other objects that kernel and workers shared, and that are replaced by new objects."""

    def to_body(self) -> dict[str, Any]:
        """Return the record as JSON-ready values."""
        weights = {
            path: {
                "entries": [
                    {"path": entry.path, "offset": entry.offset, "dtype": entry.dtype, "shape": entry.shape}
                    for entry in table.entries
                ],
                "frozen": table.frozen,
                "in_eval_mode": table.in_eval_mode,
                "checksums": table.checksums,
            }
            for path, table in self.weights.items()
        }
        return {"not_returned": self.not_returned, "rng": self.rng, "weights": weights, "replaced": self.replaced}


@dataclass(slots=True)
class PackedReturn:
    """The record and the payloads that rank 0 sends after a cell."""

    record: ReturnRecord
    payloads: dict[str, Payload] = field(default_factory=dict)


class ResultSender:
    """Packs the results of cells on rank 0; keeps the region for weights between cells."""

    def __init__(self, payloads: PayloadFactory) -> None:
        self._payloads = payloads
        self._region: RegionPayload | None = None
        # Names whose sharded weights could not be gathered after an earlier cell and are still to be returned.
        self._deferred_weights: set[str] = set()
        # By path, the owners of attributes that could not be copied: the notebook's objects lack these.
        self._uncopied: dict[str, weakref.ref[Any]] = {}

    def collect(
        self,
        namespace: Namespace,
        before: NamespaceSnapshot,
        *,
        hidden: Callable[[str, Any], bool],
        wanted: Collection[str] = (),
        rng: Any = None,
        rng_digest: str | None = None,
        partial_gradients: Set[int] = frozenset(),
    ) -> PackedReturn:
        """Pack the values that the cell has bound or changed; those of ``wanted`` names are returned whatever the size.

        Names for which ``hidden`` returns True are never returned. ``rng`` are generator states to return, and
        ``rng_digest`` identifies this process's states, even if they need not be returned.
        ``partial_gradients`` are the ids of parameters whose gradients stay here.
        """
        wanted, self._deferred_weights = {*wanted, *self._deferred_weights}, set()
        before.drop_replaced()
        alive, relocated = before.alive_objects(), before.modules_with_relocated_parts()
        restructured = before.changed_modules(relocated)
        shared = self._without_uncopied(before.shared_ids(restructured), alive)
        for name in before.shared.keys() & wanted - alive.keys():
            alive[name] = namespace.get(name)
        collection = ResultCollection(
            namespace,
            before,
            shared,
            hidden=hidden,
            wanted=wanted,
            relocated=relocated,
            uncopied=list(self._uncopied),
            rng=rng,
            partial_gradients=partial_gradients,
        )
        collection.add_new_values()
        for path, value in alive.items():
            collection.add_changes(path, value, is_restructured=path in restructured)
        outside = collection.finish(alive)
        self._deferred_weights = collection.deferred_weights
        self._uncopied |= collection.uncopied
        return self._pack(collection, rng_digest, outside)

    def close(self) -> None:
        """Free the region."""
        if self._region is not None:
            self._region.close()
            self._region = None

    def _without_uncopied(self, shared: SharedObjects, alive: Mapping[str, Any]) -> SharedObjects:
        """Return the ids of ``shared`` without those of attributes that the notebook's objects lack."""
        owners = {id(value) for value in alive.values()}
        self._uncopied = {path: owner for path, owner in self._uncopied.items() if id(owner()) in owners}
        if not self._uncopied:
            return shared
        return shared.select(lambda item: not any(is_at_or_below(item[1], path) for path in self._uncopied))

    def _pack(self, collection: ResultCollection, rng_digest: str | None, shared: SharedObjects) -> PackedReturn:
        payloads: dict[str, Payload] = {}
        delta, not_returned = collection.delta, collection.not_returned
        while delta:
            try:
                payloads[CHANGES] = delta.pack(
                    collection.namespace, shared, self._payloads, has_gradient=collection.gradients.includes_gradient_of
                )
            except SectionError as error:  # the other sections can be returned without this one
                path, cause = error.key[1], error.__cause__ or error
                not_returned[path] = f"cannot be copied ({type(cause).__name__}: {error_text(cause)})"
                delta.remove(path)
                continue
            break
        weights: dict[str, WeightTable] = {}
        if collection.weights:
            weights, num_bytes = self._write_weights(collection.weights)
            assert self._region is not None
            payloads[WEIGHTS] = self._region.share(num_bytes)
        replaced = [name for name in collection.replaced if name not in not_returned]
        return PackedReturn(ReturnRecord(not_returned, rng_digest, weights, replaced), payloads)

    def _write_weights(self, modules: Mapping[str, ReturnedWeights]) -> tuple[dict[str, WeightTable], int]:
        """Copy each tensor once into the region; return the tables of the modules, and the bytes that were written."""
        import torch

        offsets: dict[int, int] = {}
        offset = 0
        for returned in modules.values():
            for tensor in module_tensors(returned.module).values():
                if id(tensor) not in offsets:
                    offsets[id(tensor)] = offset
                    offset += (_whole_bytes(tensor) + _ALIGN - 1) // _ALIGN * _ALIGN
        if self._region is None or self._region.num_bytes < offset:
            self.close()
            self._region = self._payloads.reserve(offset)
        tables: dict[str, WeightTable] = {}
        with torch.no_grad():
            for name, returned in modules.items():
                entries = []
                for path, tensor in module_tensors(returned.module).items():
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    entry = TensorEntry(path, offsets[id(tensor)], dtype, tuple(full_shape(tensor)))
                    view_tensor(self._region, entry, _whole_bytes(tensor)).copy_(full_tensor(tensor))
                    entries.append(entry)
                tables[name] = WeightTable(
                    tuple(entries), **module_flags(returned.module), checksums=returned.checksums
                )
        return tables, offset


@dataclass(frozen=True, slots=True)
class AppliedResults:
    """The outcome of applying what a worker returned."""

    not_returned: dict[str, str]
    """By path, why a value stays on the workers."""

    paths: list[str]
    """The paths that now have the workers' values, without those of removed names."""
    removed: tuple[str, ...]
    """Names that the cell has deleted, which were now deleted from the namespace."""
    failed: dict[str, str]
    """By path, why a value could not be rebuilt."""
    replaced: dict[str, Any]
    """By name, the old objects of models and others that were replaced by new objects."""
    checksums: dict[str, TensorChecksums]
    """By path of a module whose weights came back whole, the checksums of its tensors."""
    items: ItemsBefore | None
    """The objects that changed values contained before the cell, to warn if another variable still refers to one."""


class ResultReceiver:
    """Applies returned results in the kernel; keeps the worker's region for weights between cells."""

    def __init__(self) -> None:
        self._region: RegionPayload | None = None
        self._used_bytes = 0
        self.rng: str | None = None
        """The digest of rank 0's generator states; the kernel need not send its own while they are equal."""

    def receive(
        self,
        record: ReturnRecord,
        payloads: Payloads,
        namespace: Namespace,
        shared_ids: Callable[[], Collection[int]] = frozenset,
    ) -> AppliedResults:
        """Apply returned values, weights first, and close the payloads; a part that fails does not affect others.

        ``shared_ids`` returns the ids of the objects that kernel and workers share.
        """
        unused = dict(payloads)
        try:
            if (region := find_payload(payloads, WEIGHTS, RegionPayload)) is not None:
                del unused[WEIGHTS]
                self._use_region(region)
            return self._apply(record, find_payload(payloads, CHANGES, BufferPayload), namespace, shared_ids)
        finally:
            close_all(unused.values())
            if self._region is not None and not self._region.is_reused:
                self._region.close()
                self._region = None

    def _apply(
        self,
        record: ReturnRecord,
        changes: BufferPayload | None,
        namespace: Namespace,
        shared_ids: Callable[[], Collection[int]],
    ) -> AppliedResults:
        items: ItemsBefore | None = None
        paths: dict[str, None] = {}
        removed: tuple[str, ...] = ()
        errors: dict[str, Exception] = {}
        replaced = {name: namespace.get(name) for name in record.replaced}
        checksums: dict[str, TensorChecksums] = {}
        for path, table in record.weights.items():
            try:
                self._copy_weights(resolve_path(namespace, path), table)
                paths[path] = None
                if table.checksums is not None:
                    checksums[path] = table.checksums
            except Exception as error:  # a module of the user may raise anything, or the path may be gone
                errors[path] = error
        if changes is not None:
            delta, lost = NamespaceDelta.unpack(changes, namespace)
            errors |= lost
            own_attributes = _own_attributes(delta, namespace)
            if delta.changed or record.replaced:
                items = ItemsBefore(delta.changed, record.replaced, namespace, shared_ids, delta.items)
            errors |= delta.apply(namespace)
            for value, own in own_attributes:
                set_attributes(value, own, is_complete=False)
            paths |= dict.fromkeys(delta.paths)
            removed = delta.removed
        self.rng = record.rng
        arrived = [path for path in paths if path not in errors and root_name(path) not in removed]
        failed = describe_failures(errors, "in the notebook")
        # A widget comes back as the notebook's own.
        replaced = {name: old for name, old in replaced.items() if name in arrived and namespace.get(name) is not old}
        return AppliedResults(record.not_returned, arrived, removed, failed, replaced, checksums, items)

    def close(self) -> None:
        """Release the region and the digest of the workers' generator states."""
        self.rng = None
        if self._region is not None:
            self._region.close()
            self._region = None

    def _use_region(self, region: RegionPayload) -> None:
        """Keep a region that arrived; if it is the memory that is mapped already, keep the existing mapping."""
        self._used_bytes = region.used_bytes
        if self._region is not None and self._region.identity == region.identity:
            region.close()
            return
        self.close()
        self._region = region

    def _copy_weights(self, module: Any, table: WeightTable) -> None:
        import torch

        assert self._region is not None
        tensors = {}
        for entry in table.entries:
            num_bytes = math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize
            if entry.offset < 0 or entry.offset + num_bytes > self._used_bytes:
                raise ValueError(f"the weights of {entry.path!r} are outside of the region")
            tensors[entry.path] = view_tensor(self._region, entry, num_bytes)
        state = {"tensors": tensors, "frozen": table.frozen, "in_eval_mode": table.in_eval_mode}
        set_module_state(module, state, must_copy=True)


def _own_attributes(delta: NamespaceDelta, namespace: Namespace) -> list[tuple[Any, dict[str, Any]]]:
    """Return the notebook's objects that a delta updates, each with its attributes outside of the update."""
    states = {path: item for path, item in delta.changed.items() if isinstance(item, ObjectState)}
    found: list[tuple[Any, dict[str, Any]]] = []
    for path, state in states.items():
        with suppress(Exception):  # the user's code may raise anything, and the path may be gone
            value = resolve_path(namespace, path)
            found.append((value, unsent_attributes(value, state)))
    return found


def _whole_bytes(tensor: Any) -> int:
    return math.prod(full_shape(tensor)) * tensor.element_size()


def view_tensor(region: RegionPayload, entry: TensorEntry, num_bytes: int) -> Any:
    """Return a tensor that shares memory with the bytes of an entry in a region."""
    import torch

    kind = getattr(torch, entry.dtype)
    if num_bytes == 0:
        return torch.empty(entry.shape, dtype=kind, device="cpu")
    with _ignored_warning() if memoryview(region.memory).readonly else nullcontext():
        flat = torch.frombuffer(region.memory, dtype=torch.uint8, count=num_bytes, offset=entry.offset)
    return flat.view(kind).view(entry.shape)


@contextmanager
def _ignored_warning() -> Iterator[None]:
    """Ignore torch's warning about memory that is not writable: the kernel only reads it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        yield
