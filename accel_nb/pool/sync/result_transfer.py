"""The return of a cell's results: rank 0 detects and packs the changes, the kernel applies them.

The whole value of a name is returned if the cell has bound it: the value is another object than before the cell, or
the name is new. The delta of a cell removes names that the notebook has rebound or deleted (`SharedObjectRegistry`), so
every way of writing to the namespace is detected. Python may share one object among equal numbers or strings: for
these a name that the cell's code binds is returned too, unless the notebook has sent it. If the notebook has sent a
name and its object is the same as before, the changes of that object are returned and applied in place. If the cell
has deleted such a name, the notebook deletes it too. All other names stay on the workers.

Weights of modules are copied through a memory region that is reused in later cells; everything else is a
`NamespaceDelta`. Values that are large or cannot be copied stay on the workers and are reported with the reason.
"""

from __future__ import annotations

import copyreg
import gc
import io
import math
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from accel_nb.config.byte_sizes import size_text
from accel_nb.data.ending_iterator import EndingIterator
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
    Fingerprint,
    TensorSums,
    is_state_sharded,
    module_attributes,
    module_flags,
    module_state,
    module_tensors,
    set_module_state,
)
from accel_nb.pool.sync.contents.content_kinds import ObjectAttributes, content_of
from accel_nb.pool.sync.contents.object_states import ObjectState, kept_attributes
from accel_nb.pool.sync.contents.plain_objects import is_plain_object
from accel_nb.pool.sync.long_containers import changed_contents, item_ids
from accel_nb.pool.sync.namespace_snapshot import NamespaceSnapshot, RecordedObject, tracked_fingerprint
from accel_nb.pool.sync.namespace_sync import Namespace, NamespaceDelta, describe_failures
from accel_nb.pool.sync.objects.module_gradients import ReturnedGradients, gradient_state
from accel_nb.pool.sync.objects.module_hooks import changed_module_hooks
from accel_nb.pool.sync.objects.module_parts import module_parts, paths_before
from accel_nb.pool.sync.objects.object_kinds import (
    attributes_of,
    is_module,
    is_optimizer,
    is_scheduler,
    is_sparse,
    is_tensor,
    is_training_object,
    set_attributes,
)
from accel_nb.pool.sync.objects.shared_ids import SharedId, SharedObjects
from accel_nb.pool.sync.optimizer_states import optimizer_bytes, optimizer_state
from accel_nb.pool.sync.paths.function_caches import cached_functions, has_changeable_results
from accel_nb.pool.sync.paths.items_before import ItemsBefore
from accel_nb.pool.sync.paths.object_paths import attribute_path, is_at_or_below, resolve_path, root_name
from accel_nb.pool.sync.reductions.iterators import WAS_READ, is_generator_iterator, is_iterator
from accel_nb.pool.sync.stream.pickling import Trial, copyable_values
from accel_nb.pool.sync.stream.sections import SectionError
from accel_nb.runtime.distributed.sharded import can_read_full, full_shape, full_tensor, is_sharded

LARGE_BYTES = 64 * 1024 * 1024
"""A value of more bytes stays on the workers unless requested; the weights of modules are always returned."""

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
    evaluating: list[str]
    """Submodules in evaluation mode."""
    sums: TensorSums | None = None
    """The sums of the bits of all tensors, as the kernel computes them to find later changes; None of sharded ones."""


@dataclass(frozen=True, slots=True)
class ReturnRecord:
    """The record that rank 0 returns after a cell, with the payloads."""

    kept: dict[str, str]
    """By path, why a value stays on the workers; an empty reason is not shown."""
    rng: str | None
    """The digest of rank 0's generator states."""
    weights: dict[str, WeightTable]
    """The modules in the region, by path."""
    replaced: list[str] = field(default_factory=list[str])
    """Models and other objects that kernel and workers shared, and that come back as new ones."""

    def to_body(self) -> dict[str, Any]:
        """Return the record as JSON-ready values."""
        weights = {
            path: {
                "entries": [
                    {"path": entry.path, "offset": entry.offset, "dtype": entry.dtype, "shape": entry.shape}
                    for entry in table.entries
                ],
                "frozen": table.frozen,
                "evaluating": table.evaluating,
                "sums": table.sums,
            }
            for path, table in self.weights.items()
        }
        return {"kept": self.kept, "rng": self.rng, "weights": weights, "replaced": self.replaced}


@dataclass(frozen=True, slots=True)
class ReturnedWeights:
    """A module whose weights are returned, and the sums of its tensors unless these are sharded."""

    module: Any
    sums: TensorSums | None


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
        self._left_out: dict[str, weakref.ref[Any]] = {}

    def collect(
        self,
        namespace: Namespace,
        before: NamespaceSnapshot,
        *,
        hidden: Callable[[str, Any], bool],
        wanted: Collection[str] = (),
        rng: Any = None,
        rng_digest: str | None = None,
        returns_gradients: bool = True,
    ) -> PackedReturn:
        """Pack the values that the cell has bound or changed; those of ``wanted`` names are returned whatever the size.

        Names for which ``hidden`` returns True are never returned. ``rng`` are generator states to return, and
        ``rng_digest`` identifies this process's states, even if they need not be returned. Without
        ``returns_gradients`` the gradients of models stay here.
        """
        removed = tuple(name for name in before.shared if name not in namespace)
        delta, weights, kept = NamespaceDelta(rng=rng, removed=removed), {}, {}
        replaced: list[str] = []
        wanted, self._deferred_weights = {*wanted, *self._deferred_weights}, set()
        before.forget_replaced()
        living = before.living()
        restructured = before.changed_modules()
        gradients = ReturnedGradients(LARGE_BYTES if returns_gradients else None, kept)
        shared = self._without_left_out(before.shared_ids(restructured), living)
        trial = Trial(namespace, shared)
        for name, value in dict(namespace).items():  # threads of the cell may bind names meanwhile
            is_new = before.is_new(name, value) or (name in wanted and name not in before.shared)
            if is_new and not hidden(name, value):
                self._add_whole(name, value, namespace, shared, trial, delta, kept, is_wanted=name in wanted)
        for name in before.shared.keys() & set(wanted) - living.keys():
            living[name] = namespace.get(name)
        for path, value in living.items():
            if self._is_lacking(path) or (is_sharded(value) and before.is_in_tracked_module(value)):
                continue  # a sharded parameter is returned with its model
            root, held = root_name(path), before.objects.get(path) or RecordedObject(value)
            is_wanted = root in wanted
            if root in delta.values and root not in before.shared:
                continue
            if not (held.is_tracked or is_wanted) or (path == root and hidden(root, value)):
                continue
            fingerprint = tracked_fingerprint(value, namespace, shared)
            if fingerprint == held.fingerprint and not is_wanted:
                continue
            was = held.fingerprint if held.is_tracked else fingerprint
            if was and shared.has_moved(was.kind, value):
                continue  # the receiver's value is still a view of the object that was moved here
            if path in restructured:
                moved = paths_before(value, before.module_parts.places_of(path), shared)
                delta.structures[path] = module_parts(value, moved)
                delta.modules[path] = module_state(value)
                if gradients.includes(path, value, is_wanted=is_wanted):
                    delta.gradients[path] = gradient_state(value)
                assert was is not None, "a module with changed parts has a fingerprint"
                delta.attributes[path] = module_attributes(value, namespace, shared, was.content.attributes, moved)
                delta.hooks[path] = changed_module_hooks(value, was.content.hooks)
                continue
            is_read = is_generator_iterator(value) or (fingerprint is None and is_iterator(value))
            if is_read and was and root in before.shared:
                kept[path] = WAS_READ
                continue
            if root in before.shared and fingerprint and was and (is_optimizer(value) or fingerprint.can_update(was)):
                self._add_change(
                    path, value, fingerprint, was, namespace, shared, delta, weights, gradients, kept, is_wanted
                )
            elif before.is_bound(root, namespace.get(root)) and not (fingerprint is None and "@" in path):
                self._add_whole(root, namespace[root], namespace, shared, trial, delta, kept, is_wanted=is_wanted)
                is_replaced = path == root and not isinstance(value, type)  # the parts of a class refer to it
                if is_replaced and root in before.shared and root in delta.values:
                    replaced.append(root)
        # If a changed object is returned whole, its parts are new objects in the kernel: their changes are not needed.
        whole = {name for name, value in delta.values.items() if before.is_bound(name, value)}
        for changes in (
            *(delta.structures, delta.modules, delta.gradients, delta.changed, delta.items, delta.attributes),
            delta.hooks,
            *(delta.optimizers, delta.schedulers, weights),
        ):
            for path in [path for path in changes if root_name(path) in whole]:
                del changes[path]
        outside = shared.select(lambda item: root_name(item[1]) not in whole)
        if delta.values or delta.changed:
            contents = {
                path: content
                for path, content in before.contents().items()
                if path not in kept and root_name(path) not in whole
            }
            outside = item_ids(contents, delta.items).merge(outside)
        del trial  # it holds copies of values in other memory, such as a GPU's
        for name, value in delta.values.items():
            if is_module(value):
                gradients.includes(name, value, is_wanted=name in wanted)
        kept |= _caches_kept({**living, **delta.values}, before.misses)
        packed = self._pack(delta, weights, gradients, kept, rng_digest, namespace, outside)
        packed.record.replaced.extend(name for name in replaced if name not in packed.record.kept)
        return packed

    def close(self) -> None:
        """Free the region."""
        if self._region is not None:
            self._region.close()
            self._region = None

    def _leave_out(self, path: str, owner: Any, attributes: Mapping[str, str], kept: dict[str, str]) -> None:
        for name, reason in attributes.items():
            kept[f"{path}.{name}"] = reason
            with suppress(TypeError):  # an object with slots, to which there are no weak references
                self._left_out[attribute_path(path, name)] = weakref.ref(owner)

    def _without_left_out(self, shared: SharedObjects, living: Mapping[str, Any]) -> SharedObjects:
        """Return the ids of ``shared`` without those of attributes that the notebook's objects lack."""
        owners = {id(value) for value in living.values()}
        self._left_out = {path: owner for path, owner in self._left_out.items() if id(owner()) in owners}
        return shared.select(lambda item: not self._is_lacking(item[1])) if self._left_out else shared

    def _is_lacking(self, path: str) -> bool:
        """Return whether the notebook has no object at a path, since it could not be copied."""
        return any(is_at_or_below(path, lacking) for lacking in self._left_out)

    def _add_whole(
        self,
        name: str,
        value: Any,
        namespace: Namespace,
        shared: SharedObjects,
        trial: Trial,
        delta: NamespaceDelta,
        kept: dict[str, str],
        *,
        is_wanted: bool,
    ) -> None:
        own = shared.get(id(value))
        if own and own[1] == name:  # else another name of an object that the kernel holds
            trial = Trial(namespace, shared.select(lambda item: root_name(item[1]) != name))
        limit = None if is_wanted else LARGE_BYTES
        reason = _try_value(value, trial, limit)
        if reason is None:
            delta.values[name] = value
            return
        part, left_out = (None, {}) if own else _copyable_part(value, namespace, trial.shared)
        if part is not None and _try_value(part, trial, limit) is None:
            delta.values[name] = part
            self._leave_out(name, value, left_out, kept)
        else:
            kept[name] = "" if _is_leftover(value) and not is_wanted else reason

    def _add_change(
        self,
        path: str,
        value: Any,
        fingerprint: Fingerprint,
        known: Fingerprint,
        namespace: Namespace,
        shared: SharedObjects,
        delta: NamespaceDelta,
        weights: dict[str, ReturnedWeights],
        gradients: ReturnedGradients,
        kept: dict[str, str],
        is_wanted: bool,
    ) -> None:
        """Add the changes since the fingerprint ``known``; with ``is_wanted`` the whole content whatever its size."""
        if is_module(value):
            if is_wanted or fingerprint.content.weights != known.content.weights:
                if is_state_sharded(value) and not can_read_full():
                    self._deferred_weights.add(root_name(path))
                    kept[path] = "its weights are divided among the workers; they come back with the next cell"
                elif any(is_sparse(tensor) for tensor in module_tensors(value).values()):
                    delta.modules[path] = module_state(value)
                else:
                    sums = None if is_state_sharded(value) else fingerprint.content.weights[1]
                    weights[path] = ReturnedWeights(value, sums)
            has_changed = is_wanted or fingerprint.content.gradients != known.content.gradients
            if has_changed and gradients.includes(path, value, is_wanted=is_wanted):
                delta.gradients[path] = gradient_state(value)
            if is_wanted or fingerprint.content.attributes != known.content.attributes:
                delta.attributes[path] = module_attributes(value, namespace, shared, known.content.attributes)
            if is_wanted or fingerprint.content.hooks != known.content.hooks:
                delta.hooks[path] = changed_module_hooks(value, known.content.hooks)
        elif is_optimizer(value):
            fits = is_wanted or optimizer_bytes(value) <= LARGE_BYTES
            fits = fits and (can_read_full() or not is_state_sharded(value))
            delta.optimizers[path] = optimizer_state(
                value, namespace, shared, with_tensors=fits, sizes_before=known.kind, before=known.content
            )
            if not fits:
                size = size_text(optimizer_bytes(value))
                kept[path] = f"its state of {size} is {'divided' if is_state_sharded(value) else 'large'}"
        elif is_scheduler(value):
            delta.schedulers[path] = value.state_dict()
        else:
            found = content_of(value)
            assert found is not None, "a value with a kind has content"
            limit = None if is_wanted or "@" in path else LARGE_BYTES
            content = found[1]
            contents = changed_contents(known.content, fingerprint.content, namespace, shared)
            items = item_ids({path: known.content}, {} if contents is None else {path: contents})
            sent = content if contents is None else (content, contents)
            reason = _try_value(sent, Trial(namespace, items.merge(shared)), limit)
            if reason is not None and isinstance(content, ObjectAttributes) and not reason.endswith("large"):
                copyable, left_out = _split_attributes(content.values, namespace, shared)
                self._leave_out(path, value, left_out, kept)
                content, reason = ObjectAttributes(copyable, left_out=frozenset(left_out)), None
            if reason is None:
                delta.changed[path] = content
                if contents is not None:
                    delta.items[path] = contents
            else:
                kept[path] = reason

    def _pack(
        self,
        delta: NamespaceDelta,
        modules: Mapping[str, ReturnedWeights],
        gradients: ReturnedGradients,
        kept: dict[str, str],
        rng_digest: str | None,
        namespace: Namespace,
        shared: SharedObjects,
    ) -> PackedReturn:
        payloads: dict[str, Payload] = {}
        while delta:
            try:
                payloads[CHANGES] = delta.pack(
                    namespace, shared, self._payloads, has_gradient=gradients.includes_that_of
                )
            except SectionError as error:  # the other sections can be returned without this one
                path, cause = error.key[1], error.__cause__
                kept[path] = f"cannot be copied ({type(cause).__name__}: {cause})"
                delta.remove(path)
                continue
            break
        weights: dict[str, WeightTable] = {}
        if modules:
            weights, num_bytes = self._write_weights(modules)
            assert self._region is not None
            payloads[WEIGHTS] = self._region.share(num_bytes)
        return PackedReturn(ReturnRecord(kept, rng_digest, weights), payloads)

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
                tables[name] = WeightTable(tuple(entries), **module_flags(returned.module), sums=returned.sums)
        return tables, offset


@dataclass(frozen=True, slots=True)
class AppliedResults:
    """The outcome of applying what a worker returned."""

    kept: dict[str, str]
    """By path, why a value stays on the workers."""

    paths: list[str]
    """The paths that now have the workers' values, without those of removed names."""
    removed: tuple[str, ...]
    """Names that the cell has deleted, which were now deleted from the namespace."""
    failed: dict[str, str]
    """By path, why a value could not be rebuilt."""
    replaced: dict[str, Any]
    """By name, the old ones of models and other objects that are new ones now."""
    sums: dict[str, TensorSums]
    """By path of a module whose weights came back whole, the sums of its tensors."""
    items: ItemsBefore | None
    """What changed values contained before, of which something else may refer to an object that is a new one now."""


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
        sums: dict[str, TensorSums] = {}
        for path, table in record.weights.items():
            try:
                self._copy_weights(resolve_path(namespace, path), table)
                paths[path] = None
                if table.sums is not None:
                    sums[path] = table.sums
            except Exception as error:  # a module of the user may raise anything, or the path may be gone
                errors[path] = error
        if changes is not None:
            delta, lost = NamespaceDelta.unpack(changes, namespace)
            errors |= lost
            kept = _kept_attributes(delta, namespace)
            if delta.changed or record.replaced:
                items = ItemsBefore(delta.changed, record.replaced, namespace, shared_ids, delta.items)
            errors |= delta.apply(namespace)
            for value, own in kept:
                set_attributes(value, own, is_complete=False)
            paths |= dict.fromkeys(delta.paths)
            removed = delta.removed
        self.rng = record.rng
        arrived = [path for path in paths if path not in errors and root_name(path) not in removed]
        failed = describe_failures(errors, "in the notebook")
        # A widget comes back as the notebook's own.
        replaced = {name: old for name, old in replaced.items() if name in arrived and namespace.get(name) is not old}
        return AppliedResults(record.kept, arrived, removed, failed, replaced, sums, items)

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
        state = {"tensors": tensors, "frozen": table.frozen, "evaluating": table.evaluating}
        set_module_state(module, state, is_borrowed=True)


def _caches_kept(values: Mapping[str, Any], misses: Mapping[str, int]) -> dict[str, str]:
    """Return why the caches stay here of functions among some values that have computed more results than before."""
    return {
        f"{label}.cache": "the notebook's function computes these results again"
        for path, value in values.items()
        if path == root_name(path)
        for label, function in cached_functions(path, value)
        if function.cache_info().misses > misses.get(label, 0) and has_changeable_results(function)
    }


def _kept_attributes(delta: NamespaceDelta, namespace: Namespace) -> list[tuple[Any, dict[str, Any]]]:
    """Return the notebook's objects whose states a delta has, each with the attributes that are no part of these."""
    states = {path: item for path, item in delta.changed.items() if isinstance(item, ObjectState)}
    found: list[tuple[Any, dict[str, Any]]] = []
    for path, state in states.items():
        with suppress(Exception):  # the user's code may raise anything, and the path may be gone
            value = resolve_path(namespace, path)
            found.append((value, kept_attributes(value, state)))
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


def _is_leftover(value: Any) -> bool:
    """Return whether a value that cannot be copied is left over from a loop or a block, so that no report is needed.

    True for closed files, generators that have ended, iterators that read from one of these, and progress bars, unless
    they refer to a tensor or a model.
    """
    waiting, seen = [value], {id(value)}
    while waiting:
        item = waiting.pop()
        own = attributes_of(item) or {}
        if any(is_training_object(held) or is_tensor(held) for held in own.values()):
            return False
        is_progress = hasattr(type(item), "__iter__") and "iterable" in own and "disable" in own
        if is_progress or _has_ended(item):
            return True
        if is_iterator(item):
            sources = [held for held in (*own.values(), *_sources(item)) if is_iterator(held)]
            waiting += [held for held in sources if id(held) not in seen]
            seen.update(map(id, sources))
    return False


def _sources(iterator: Any) -> list[Any]:
    referents = gc.get_referents(iterator)
    if isinstance(iterator, zip | map):  # they end with the first of several, which are in a tuple
        return [item for held in referents if isinstance(held, tuple) for item in held]
    return referents


def _has_ended(value: Any) -> bool:
    if isinstance(value, io.IOBase):
        return value.closed
    if isinstance(value, EndingIterator):
        return value.has_ended
    return isinstance(value, types.GeneratorType) and value.gi_frame is None


def _split_attributes(
    values: Mapping[str, Any], namespace: Namespace, shared: Mapping[int, SharedId]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the attributes that can be copied, and the reasons why the others cannot."""
    copyable = copyable_values(values, namespace, shared)
    others = values.keys() - copyable.keys()
    return copyable, {name: f"{type(values[name]).__qualname__} cannot be copied" for name in sorted(others)}


def _copyable_part(value: Any, namespace: Namespace, shared: Mapping[int, SharedId]) -> tuple[Any, dict[str, str]]:
    """Return an object of the notebook's classes without the attributes that cannot be copied, and the reasons.

    A trainer that reads its batches from a generator comes back without this. None for any other value.
    """
    if type(value).__module__ != "__main__" or not is_plain_object(value):
        return None, {}
    copyable, left_out = _split_attributes(attributes_of(value) or {}, namespace, shared)
    if not copyable:
        return None, {}
    part = copyreg.__newobj__(type(value))  # type: ignore[attr-defined]
    set_attributes(part, copyable)
    return part, left_out


def _try_value(value: Any, trial: Trial, limit: int | None) -> str | None:
    """Return None if a value can be returned, else the reason why not."""
    try:
        size = trial.num_bytes(value)
    except Exception as error:
        reason = f"{type(value).__qualname__} cannot be copied ({type(error).__name__})"
        is_read = is_iterator(value) and not isinstance(value, io.IOBase)
        return f"{reason}; the next cell on the workers continues reading it" if is_read else reason
    if limit is not None and size > limit and not is_module(value):
        trial.reset()  # the value is not sent, so what it contains counts in others
        return f"{size_text(size)} is large"
    return None
