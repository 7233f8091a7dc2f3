"""The results of a cell on rank 0: which values and changes are returned, and why others stay on the workers."""

from __future__ import annotations

import gc
import io
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from accel_nb.config.byte_sizes import size_text
from accel_nb.data.ending_iterator import EndingIterator
from accel_nb.pool.sync.change_detection import (
    Fingerprint,
    TensorChecksums,
    is_state_sharded,
    module_attributes,
    module_state,
    module_tensors,
)
from accel_nb.pool.sync.contents.content_kinds import ObjectAttributes, content_of
from accel_nb.pool.sync.contents.plain_objects import is_plain_object
from accel_nb.pool.sync.long_containers import changed_contents, item_ids
from accel_nb.pool.sync.namespace_snapshot import NamespaceSnapshot, RecordedObject, tracked_fingerprint
from accel_nb.pool.sync.namespace_sync import Namespace, NamespaceDelta
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
from accel_nb.pool.sync.paths.object_paths import attribute_path, is_at_or_below, root_name
from accel_nb.pool.sync.reductions.iterators import WAS_READ, is_generator_iterator, is_iterator
from accel_nb.pool.sync.stream.pickling import CopyChecker, copyable_values
from accel_nb.runtime.distributed.sharded import can_read_full, is_sharded

LARGE_BYTES = 64 * 1024 * 1024
"""A value of more bytes stays on the workers unless requested; the weights of modules are always returned."""


@dataclass(frozen=True, slots=True)
class ReturnedWeights:
    """A module whose weights are returned, and the checksums of its tensors unless these are sharded."""

    module: Any
    checksums: TensorChecksums | None


class ResultCollection:
    """Collects the values that a cell has bound and the changes of the objects that the notebook has sent.

    Call `add_new_values`, then `add_changes` for each object, then `finish`.

    Args:
        namespace: the names of this rank.
        before: the snapshot from before the cell.
        shared: the ids of the objects that the notebook has.
        hidden: returns True for names that are never returned.
        wanted: names whose values are returned whatever their size.
        relocated: the paths of modules with parts that were elsewhere before.
        uncopied: the paths of attributes that could not be copied, so that the notebook's objects lack them.
        rng: generator states to return.
        partial_gradients: the ids of the parameters whose gradients are not returned.
    """

    def __init__(
        self,
        namespace: Namespace,
        before: NamespaceSnapshot,
        shared: SharedObjects,
        *,
        hidden: Callable[[str, Any], bool],
        wanted: Collection[str],
        relocated: Collection[str],
        uncopied: Collection[str],
        rng: Any,
        partial_gradients: Set[int],
    ) -> None:
        self.namespace = namespace
        removed = tuple(name for name in before.shared if name not in namespace)
        self.delta = NamespaceDelta(rng=rng, removed=removed)
        # By path, the modules whose weights are returned through the region.
        self.weights: dict[str, ReturnedWeights] = {}
        # By path, why a value stays on the workers.
        self.not_returned: dict[str, str] = {}
        self.gradients = ReturnedGradients(LARGE_BYTES, partial_gradients, self.not_returned)
        # Names of shared objects that are returned as new ones.
        self.replaced: list[str] = []
        # Names of modules with sharded weights that cannot be gathered now.
        self.deferred_weights: set[str] = set()
        # By path, the owners of attributes that cannot be copied.
        self.uncopied: dict[str, weakref.ref[Any]] = {}
        self._before = before
        self._shared = shared
        self._hidden = hidden
        self._wanted = wanted
        self._relocated = relocated
        self._uncopied_before = uncopied
        self._copy_checker = CopyChecker(namespace, shared)

    def add_new_values(self) -> None:
        """Add the values of the names that the cell has bound to other objects, and of wanted names."""
        for name, value in dict(self.namespace).items():  # threads of the cell may bind names meanwhile
            is_wanted = name in self._wanted
            is_new = self._before.is_new(name, value) or (is_wanted and name not in self._before.shared)
            if is_new and not self._hidden(name, value):
                self._add_whole(name, value, is_wanted=is_wanted)

    def add_changes(self, path: str, value: Any, *, is_restructured: bool) -> None:
        """Add the changes of the object at a path, if there are any.

        ``is_restructured`` states whether it is a module with other parts than before the cell.
        """
        before, shared = self._before, self._shared
        if any(is_at_or_below(path, other) for other in (*self._uncopied_before, *self.uncopied)):
            return
        if is_sharded(value) and before.is_in_tracked_module(value):
            return  # a sharded parameter is returned with its model
        root, recorded = root_name(path), before.objects.get(path) or RecordedObject(value)
        is_wanted = root in self._wanted
        if root in self.delta.values and root not in before.shared:
            return
        if not (recorded.is_tracked or is_wanted) or (path == root and self._hidden(root, value)):
            return
        fingerprint = tracked_fingerprint(value, self.namespace, shared)
        if fingerprint == recorded.fingerprint and not is_wanted and path not in self._relocated:
            return
        earlier = recorded.fingerprint if recorded.is_tracked else fingerprint
        if earlier and shared.has_moved(earlier.kind, value):
            return  # the receiver's value is still a view of the object that was moved here
        if is_restructured:
            assert earlier is not None, "a module with changed parts has a fingerprint"
            self._add_restructured(path, value, earlier, is_wanted=is_wanted)
            return
        is_read = is_generator_iterator(value) or (fingerprint is None and is_iterator(value))
        if is_read and earlier and root in before.shared:
            self.not_returned[path] = WAS_READ
        elif root in before.shared and fingerprint and earlier and self._can_update(path, value, fingerprint, earlier):
            self._add_update(path, value, fingerprint, earlier, is_wanted=is_wanted)
        elif before.is_bound(root, self.namespace.get(root)) and not (fingerprint is None and "@" in path):
            self._add_whole(root, self.namespace[root], is_wanted=is_wanted)
            is_replaced = path == root and not isinstance(value, type)  # the parts of a class refer to it
            if is_replaced and root in before.shared and root in self.delta.values:
                self.replaced.append(root)

    def _can_update(self, path: str, value: Any, fingerprint: Fingerprint, earlier: Fingerprint) -> bool:
        """Return whether the receiver's object at a path, with the fingerprint ``earlier``, can be changed in place."""
        return is_optimizer(value) or (fingerprint.can_update(earlier) and path not in self._relocated)

    def finish(self, alive: Mapping[str, Any]) -> SharedObjects:
        """Drop changes of objects that are returned whole; return the ids of the objects that are not returned whole.

        ``alive`` are the objects that `add_changes` was called for, by path. Nothing can be added afterwards.
        """
        before, delta = self._before, self.delta
        # The parts of an object that is returned whole are new objects in the kernel: their changes are not needed.
        whole = {name for name, value in delta.values.items() if before.is_bound(name, value)}
        for changes in (*delta.changes_by_path(), self.weights):
            for path in [path for path in changes if root_name(path) in whole]:
                del changes[path]
        outside = self._shared.select(lambda item: root_name(item[1]) not in whole)
        if delta.values or delta.changed:
            contents = {
                path: content
                for path, content in before.contents().items()
                if path not in self.not_returned and root_name(path) not in whole
            }
            outside = item_ids(contents, delta.items).merge(outside)
        del self._copy_checker  # it holds copies of values in other memory, such as a GPU's
        for name, value in delta.values.items():
            if is_module(value):
                self.gradients.includes(name, value, is_wanted=name in self._wanted)
        self.not_returned |= _unreturned_caches({**alive, **delta.values}, before.misses)
        return outside

    def _add_whole(self, name: str, value: Any, *, is_wanted: bool) -> None:
        """Add the value of a name, or the part of it that can be copied."""
        copy_checker, own = self._copy_checker, self._shared.get(id(value))
        if own and own[1] == name:  # else another name of an object that the kernel holds
            copy_checker = CopyChecker(self.namespace, self._shared.select(lambda item: root_name(item[1]) != name))
        limit = None if is_wanted else LARGE_BYTES
        reason = _reason_not_to_return(value, copy_checker, limit)
        if reason is None:
            self.delta.values[name] = value
            return
        part, uncopied = (None, {}) if own else _copyable_part(value, self.namespace, copy_checker.shared)
        if part is not None and _reason_not_to_return(part, copy_checker, limit) is None:
            self.delta.values[name] = part
            self._record_uncopied(name, value, uncopied)
        else:
            self.not_returned[name] = "" if _is_leftover(value) and not is_wanted else reason

    def _add_restructured(self, path: str, module: Any, earlier: Fingerprint, *, is_wanted: bool) -> None:
        """Add the parts and the whole state of a module whose parts have changed since the fingerprint ``earlier``."""
        delta, shared = self.delta, self._shared
        earlier_paths = paths_before(module, self._before.module_parts.places_of(path), shared)
        delta.structures[path] = module_parts(module, earlier_paths)
        delta.modules[path] = module_state(module)
        if self.gradients.includes(path, module, is_wanted=is_wanted):
            delta.gradients[path] = gradient_state(module)
        delta.attributes[path] = module_attributes(
            module, self.namespace, shared, earlier.content.attributes, earlier_paths
        )
        delta.hooks[path] = changed_module_hooks(module, earlier.content.hooks)

    def _add_update(
        self, path: str, value: Any, fingerprint: Fingerprint, earlier: Fingerprint, *, is_wanted: bool
    ) -> None:
        """Add the changes since the fingerprint ``earlier``; with ``is_wanted`` the whole content whatever its size."""
        if is_module(value):
            self._add_module(path, value, fingerprint, earlier, is_wanted=is_wanted)
        elif is_optimizer(value):
            self._add_optimizer(path, value, earlier, is_wanted=is_wanted)
        elif is_scheduler(value):
            self.delta.schedulers[path] = value.state_dict()
        else:
            self._add_content(path, value, fingerprint, earlier, is_wanted=is_wanted)

    def _add_module(
        self, path: str, module: Any, fingerprint: Fingerprint, earlier: Fingerprint, *, is_wanted: bool
    ) -> None:
        delta, content, before = self.delta, fingerprint.content, earlier.content
        if is_wanted or content.weights != before.weights:
            if is_state_sharded(module) and not can_read_full():
                self.deferred_weights.add(root_name(path))
                self.not_returned[path] = "its weights are sharded over the workers; the next cell returns them"
            elif not all(map(_has_plain_bytes, module_tensors(module).values())):
                delta.modules[path] = module_state(module)
            else:
                checksums = None if is_state_sharded(module) else content.weights[1]
                self.weights[path] = ReturnedWeights(module, checksums)
        has_changed = is_wanted or content.gradients != before.gradients
        if has_changed and self.gradients.includes(path, module, is_wanted=is_wanted):
            delta.gradients[path] = gradient_state(module)
        if is_wanted or content.attributes != before.attributes:
            delta.attributes[path] = module_attributes(module, self.namespace, self._shared, before.attributes)
        if is_wanted or content.hooks != before.hooks:
            delta.hooks[path] = changed_module_hooks(module, before.hooks)

    def _add_optimizer(self, path: str, optimizer: Any, earlier: Fingerprint, *, is_wanted: bool) -> None:
        fits = is_wanted or optimizer_bytes(optimizer) <= LARGE_BYTES
        fits = fits and (can_read_full() or not is_state_sharded(optimizer))
        self.delta.optimizers[path] = optimizer_state(
            optimizer, self.namespace, self._shared, with_tensors=fits, before=earlier.content
        )
        if not fits:
            size = size_text(optimizer_bytes(optimizer))
            self.not_returned[path] = f"its state of {size} is {'sharded' if is_state_sharded(optimizer) else 'large'}"

    def _add_content(
        self, path: str, value: Any, fingerprint: Fingerprint, earlier: Fingerprint, *, is_wanted: bool
    ) -> None:
        """Add the new content of a container, or of another object whose content can be set."""
        found = content_of(value)
        assert found is not None, "a value with a kind has content"
        limit = None if is_wanted or "@" in path else LARGE_BYTES
        content = found[1]
        contents = changed_contents(earlier.content, fingerprint.content, self.namespace, self._shared)
        items = item_ids({path: earlier.content}, {} if contents is None else {path: contents})
        sent = content if contents is None else (content, contents)
        reason = _reason_not_to_return(sent, CopyChecker(self.namespace, items.merge(self._shared)), limit)
        if reason is not None and isinstance(content, ObjectAttributes) and not reason.endswith("large"):
            copyable, uncopied = _split_attributes(content.values, self.namespace, self._shared)
            self._record_uncopied(path, value, uncopied)
            content, reason = ObjectAttributes(copyable, left_out=frozenset(uncopied)), None
        if reason is None:
            self.delta.changed[path] = content
            if contents is not None:
                self.delta.items[path] = contents
        else:
            self.not_returned[path] = reason

    def _record_uncopied(self, path: str, owner: Any, attributes: Mapping[str, str]) -> None:
        """Record attributes that cannot be copied, with the reasons."""
        for name, reason in attributes.items():
            self.not_returned[f"{path}.{name}"] = reason
            with suppress(TypeError):  # an object with slots, to which there are no weak references
                self.uncopied[attribute_path(path, name)] = weakref.ref(owner)


def _unreturned_caches(values: Mapping[str, Any], misses: Mapping[str, int]) -> dict[str, str]:
    """Return, by label, why the caches of functions that have computed more results are not returned."""
    return {
        f"{label}.cache": "the notebook's function computes these results again"
        for path, value in values.items()
        if path == root_name(path)
        for label, function in cached_functions(path, value)
        if function.cache_info().misses > misses.get(label, 0) and has_changeable_results(function)
    }


def _is_leftover(value: Any) -> bool:
    """Return whether a value that cannot be copied is left over from a loop or a block, so that no report is needed.

    True for closed files, generators that have ended, iterators that read from one of these, and progress bars, unless
    they refer to a tensor or a model.
    """
    waiting, seen = [value], {id(value)}
    while waiting:
        item = waiting.pop()
        own = attributes_of(item) or {}
        if any(is_training_object(recorded) or is_tensor(recorded) for recorded in own.values()):
            return False
        is_progress = hasattr(type(item), "__iter__") and "iterable" in own and "disable" in own
        if is_progress or _has_ended(item):
            return True
        if is_iterator(item):
            sources = [recorded for recorded in (*own.values(), *_sources(item)) if is_iterator(recorded)]
            waiting += [recorded for recorded in sources if id(recorded) not in seen]
            seen.update(map(id, sources))
    return False


def _sources(iterator: Any) -> list[Any]:
    referents = gc.get_referents(iterator)
    if isinstance(iterator, zip | map):  # they end with the first of several, which are in a tuple
        return [item for recorded in referents if isinstance(recorded, tuple) for item in recorded]
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
    copyable, uncopied = _split_attributes(attributes_of(value) or {}, namespace, shared)
    if not copyable:
        return None, {}
    try:
        part = object.__new__(type(value))  # ``__new__`` of the class may need arguments
    except TypeError:  # it inherits from a class that is made by C code
        return None, {}
    set_attributes(part, copyable)
    return part, uncopied


def _has_plain_bytes(tensor: Any) -> bool:
    """Return whether the content of a tensor is a number of bytes for each element."""
    return not (is_sparse(tensor) or tensor.is_meta or tensor.is_quantized)


def _reason_not_to_return(value: Any, copy_checker: CopyChecker, limit: int | None) -> str | None:
    """Return None if a value can be returned, else the reason why not."""
    try:
        size = copy_checker.num_bytes(value)
    except Exception as error:
        reason = f"{type(value).__qualname__} cannot be copied ({type(error).__name__})"
        is_read = is_iterator(value) and not isinstance(value, io.IOBase)
        return f"{reason}; the next cell on the workers continues reading it" if is_read else reason
    if limit is not None and size > limit and not is_module(value):
        copy_checker.reset()  # the value is not sent, so its parts count as parts of other values
        return f"{size_text(size)} is large"
    return None
