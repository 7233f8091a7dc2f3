"""The kernel's record of the objects that its workers hold, from which it determines what a cell must be sent.

An object is recorded by the path at which code reaches it, with a fingerprint of its content: what has changed since
is sent as a `NamespaceDelta`.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_nb.errors import ShippingError, error_text
from accel_nb.pool.payload import BufferPayload, PayloadFactory
from accel_nb.pool.sync.change_detection import (
    Fingerprint,
    TensorChecksums,
    content_fingerprint,
    fingerprint_of,
    is_compared_by_identity,
    module_attributes,
    module_state,
    outdated_fingerprint,
)
from accel_nb.pool.sync.contents.content_kinds import content_of, is_replaced_whole
from accel_nb.pool.sync.long_containers import ItemsContent, changed_contents, item_ids
from accel_nb.pool.sync.namespace_sync import Namespace, NamespaceDelta
from accel_nb.pool.sync.objects.identities import Identities
from accel_nb.pool.sync.objects.module_gradients import gradient_state
from accel_nb.pool.sync.objects.module_hooks import changed_module_hooks
from accel_nb.pool.sync.objects.object_kinds import (
    attributes_of,
    is_loader,
    is_module,
    is_module_class,
    is_optimizer,
    is_scheduler,
    is_tensor,
    is_training_object,
)
from accel_nb.pool.sync.objects.shared_ids import OUTDATED, OptimizerParts, SharedId, SharedObjects, shared_ids
from accel_nb.pool.sync.objects.user_attributes import users_forward
from accel_nb.pool.sync.objects.user_hooks import gradient_hooks, method_ids
from accel_nb.pool.sync.optimizer_states import group_parameters, optimizer_state
from accel_nb.pool.sync.paths.object_paths import is_below_training_object, referenced_objects, resolve_path, root_name
from accel_nb.pool.sync.reductions.iterators import is_iterator
from accel_nb.pool.sync.references import ReferenceRecorder
from accel_nb.pool.sync.stream.pickling import dump
from accel_nb.pool.sync.stream.sections import SectionError

_ABSENT = object()
"""The recorded value of a name that the namespace did not have."""
_SUPERSEDED = object()
"""A recorded value that equals no other: the workers' binding is out of date even if the notebook's is unchanged."""


_OWN_REFERENCES = 3
"""References by the namespace, by an entry, and by the argument of `sys.getrefcount`."""


@dataclass(slots=True)
class _Entry:
    """The kernel's record of an object that the workers hold."""

    value: Any
    fingerprint: Fingerprint | None
    is_worker_only: bool = False


@dataclass(frozen=True, slots=True)
class SerializedChanges:
    """The data sent with a cell: the payload, or None if nothing has changed, its paths, and the names left out."""

    payload: BufferPayload | None
    sent_paths: list[str]
    left_out: dict[str, str]
    """Names that cannot be sent and that the cell does not need, each with the reason."""
    removed_names: tuple[str, ...] = ()
    """Names that the workers are to delete."""


class _Unsendable(Exception):
    """Some names cannot be sent; ``problems`` has the reason of each."""

    def __init__(self, problems: dict[str, str]) -> None:
        self.problems = problems


class SharedObjectRegistry:
    """The kernel's registry of the objects that the workers hold, by path, with the fingerprints of their content.

    A name that the notebook has bound to another object, or deleted, since the workers received or sent its value is
    out of date on the workers. If the next delta does not contain its new value, the delta removes the name: a cell
    finds either the notebook's value or none, and a binding that the cell makes can be detected.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._parts: dict[str, list[str]] = {}
        # By the path of an entry, the other paths to the same object: the entry moves to one of them when the name of
        # the first is bound to another object.
        self._aliases: dict[str, dict[str, None]] = {}
        # The notebook's value of a name at the time when the workers' name was bound.
        self._bindings: dict[str, Any] = {}
        # By id, iterators of the notebook that workers have read from.
        self._outdated_iterators: dict[int, Any] = {}
        self.imported = SharedObjects()
        """The ids of objects of modules that kernel and workers import."""

    def shared_ids(self) -> SharedObjects:
        """Return the ids of the objects that kernel and workers share."""
        entries = {path: entry for path, entry in self._entries.items() if not entry.is_worker_only}
        parts = {
            path: entry.fingerprint.content.parts if entry.fingerprint else OptimizerParts()
            for path, entry in entries.items()
            if is_optimizer(entry.value)
        }
        ids = shared_ids({path: entry.value for path, entry in entries.items()}, parts)
        outdated = SharedObjects(dict.fromkeys(self._outdated_iterators, OUTDATED))
        return self.imported.merge(outdated).merge(ids)

    def shared_names(self, namespace: Mapping[str, Any] | None = None) -> list[str]:
        """Return the shared names; with ``namespace`` only those whose value is still the one that was sent."""
        names = [path for path, entry in self._entries.items() if "@" not in path and not entry.is_worker_only]
        if namespace is None:
            return names
        return [
            name
            for name in names
            if namespace.get(name) is self._entries[name].value
            and all(self._is_in_place(path, namespace) for path in self._parts.get(name, ()))
        ]

    def serialize_changes(
        self,
        names: Iterable[str],
        namespace: Namespace,
        payloads: PayloadFactory,
        *,
        rng: Any = None,
        optional: Collection[str] = (),
    ) -> SerializedChanges:
        """Serialize values and changes of ``names`` that the workers lack, and the list of names that are out of date.

        ``rng`` are generator states to send too. ``optional`` names that cannot be copied are left out, and removed
        on the workers. Raise ShippingError with each other name that cannot be copied, the reason, and what to do.
        The caller owns the payload, and calls `record_sent` with the paths and `record_deleted` with the names that it
        sends.
        """
        names = list(dict.fromkeys(names))
        outdated = self._outdated(namespace)
        renamed = self._renamed(outdated, names, namespace)
        moved = {id(namespace[name]) for name in renamed}
        self.forget(
            [name for name in outdated if name not in self._entries or id(self._entries[name].value) not in moved]
        )
        names += renamed
        left_out: dict[str, str] = {}
        while True:
            removed = [name for name in dict.fromkeys([*outdated, *left_out]) if name in self._bindings]
            delta = NamespaceDelta(
                rng=rng, removed=tuple(name for name in removed if name in left_out or name not in names)
            )
            try:
                payload = self._write([name for name in names if name not in left_out], namespace, delta, payloads)
            except _Unsendable as error:
                needed = [problem for name, problem in error.problems.items() if name not in optional]
                if needed or not error.problems.keys() - left_out.keys():
                    raise ShippingError("\n".join(needed or error.problems.values())) from None
                left_out |= error.problems
                continue
            return SerializedChanges(payload, delta.paths, left_out, delta.removed)

    def _write(
        self, names: list[str], namespace: Namespace, delta: NamespaceDelta, payloads: PayloadFactory
    ) -> BufferPayload | None:
        references = ReferenceRecorder(self.shared_ids() if names else SharedObjects())
        problems: dict[str, str] = {}
        waiting, seen, has_lost_state = list(names), set(names), False
        while waiting:
            name = waiting.pop(0)
            try:
                has_lost_state |= self._add(name, namespace, references, delta)
            except Exception as error:
                problems[name] = _describe_problem(name, namespace[name], error)
            # A change of an object is also a change of each value that refers to it.
            further = {root_name(path) for path in references.looked_up} - seen
            waiting += sorted(name for name in further if name in namespace)
            seen |= further
            references.looked_up.clear()
        if problems:
            raise _Unsendable(problems)
        if has_lost_state:
            # The workers' optimizer refers to the model that is replaced: send both in one stream.
            self.forget(self.shared_names())
            again = NamespaceDelta(rng=delta.rng, removed=delta.removed)
            payload = self._write(names, namespace, again, payloads)
            delta.replace_content(again)
            return payload
        delta.removed = tuple(name for name in delta.removed if name not in delta.values)
        if not delta:
            return None
        still_shared = ReferenceRecorder(
            references.select(
                lambda item: (root := root_name(item[1])) not in delta.values or not self._is_shared(root, namespace)
            ).merge(self._replaced_whole(namespace, seen))
        )
        if delta.values or delta.changed:
            still_shared = ReferenceRecorder(self._item_ids(delta).merge(still_shared))
        try:
            worker_only = {name for name, entry in self._entries.items() if entry.is_worker_only}
            payload = delta.pack(
                namespace, still_shared, payloads, kept_names=worker_only, has_gradient=lambda parameter: True
            )
        except SectionError as error:
            raise _Unsendable(_find_problems(delta.values, namespace, still_shared, error)) from None
        further = {root_name(path) for path in still_shared.looked_up} - seen
        if further := sorted(name for name in further if name in namespace):
            payload.close()
            delta.replace_content(NamespaceDelta(rng=delta.rng, removed=delta.removed))
            return self._write([*names, *further], namespace, delta, payloads)
        return payload

    def _item_ids(self, delta: NamespaceDelta) -> SharedObjects:
        """Return the ids of the items of long containers that the workers hold."""
        return item_ids(
            {
                path: entry.fingerprint.content
                for path, entry in self._entries.items()
                if entry.fingerprint and not entry.is_worker_only and root_name(path) not in delta.values
            },
            delta.items,
        )

    def _replaced_whole(self, namespace: Namespace, names: Collection[str]) -> SharedObjects:
        """Return the ids of objects with other names than ``names`` that are replaced whole, and that workers lack.

        A value that contains one is sent with that name: it stays one object when a cell changes it.
        """
        return SharedObjects(
            {
                id(value): ("name", name, "")
                for name, value in dict(namespace).items()
                if name not in names and name not in self._entries and name[:1] != "_" and is_replaced_whole(value)
            }
        )

    def record_sent(
        self, paths: Iterable[str], namespace: Namespace, checksums: Mapping[str, TensorChecksums] | None = None
    ) -> None:
        """Record that the workers now hold the notebook's values of the names of ``paths``.

        ``checksums`` has by path of a module the checksums of its tensors, if rank 0 has sent them with the weights.
        """
        names = list(dict.fromkeys(root_name(path) for path in paths))
        moved = self.forget(names)
        self._drop_parts([path for path in moved if not self._is_in_place(path, namespace)])
        known = {id(entry.value): path for path, entry in self._entries.items()}
        fresh: list[str] = []
        for name in names:
            value = namespace[name]
            self._entries[name] = _Entry(value, None)
            self._bindings[name] = value
            fresh += [name, known.setdefault(id(value), name)]  # another path, if `forget` has moved the entry
        for name in names:
            for own_path, part in referenced_objects(name, namespace[name]).items():
                path = known.setdefault(id(part), own_path)
                if path != own_path:
                    self._aliases.setdefault(path, {})[own_path] = None
                if path not in self._entries:
                    self._entries[path] = _Entry(part, None)
                    self._parts.setdefault(name, []).append(path)
                fresh.append(path)
        entries = {path: self._entries[path] for path in fresh}
        changing = {
            path: entry
            for path, entry in entries.items()
            if not entry.is_worker_only and not is_compared_by_identity(entry.value)
        }
        # Those of optimizers have the parts of their states that kernel and workers share, to which other values may
        # refer.
        optimizers = {path: entry for path, entry in changing.items() if is_optimizer(entry.value)}
        others = {path: entry for path, entry in changing.items() if path not in optimizers}
        for entries in (optimizers, others):
            shared = self.shared_ids() if entries else SharedObjects()
            for path, entry in entries.items():
                try:
                    entry.fingerprint = _fingerprint(path, entry.value, namespace, shared, (checksums or {}).get(path))
                except Exception:  # a value that cannot be copied counts as changed
                    if is_below_training_object(path):
                        self._drop_parts([path])

    def record_worker_only(self, name: str, namespace: Namespace) -> None:
        """Record that the workers have a different value of a name, which they keep until the notebook rebinds it."""
        self.forget([name])
        self._bindings[name] = namespace.get(name, _ABSENT)
        self._entries[name] = _Entry(namespace.get(name), None, is_worker_only=True)

    def record_different(self, names: Iterable[str]) -> None:
        """Record that workers have other values of ``names``: the next cell that uses one gets the notebook's value."""
        for name in names:
            entry = self._entries.get(name)
            if entry is None or entry.is_worker_only:
                continue
            if entry.fingerprint is None or entry.fingerprint.kind is None:
                self.forget([name])
                continue
            for path in (name, *self._parts.get(name, ())):
                part = self._entries[path]
                if part.fingerprint is not None and not is_training_object(part.value) and not is_tensor(part.value):
                    part.fingerprint = Fingerprint(part.fingerprint.kind, None)

    def record_unequal(self, names: Iterable[str]) -> None:
        """Record that ranks may have other values of some names, trained ones included: they are sent again in place.

        For ranks that were stopped after different steps.
        """
        for name in names:
            entry = self._entries.get(name)
            if entry is None or entry.is_worker_only:
                continue
            if entry.fingerprint is None or entry.fingerprint.kind is None:
                self.forget([name])
                continue
            for path in (name, *self._parts.get(name, ())):
                part = self._entries[path]
                if part.fingerprint is not None:
                    part.fingerprint = outdated_fingerprint(part.value, part.fingerprint)

    def record_rank_dependent(self) -> None:
        """Record that workers other than rank 0 may have the items of long containers in another order."""
        for entry in self._entries.values():
            if entry.fingerprint is not None and isinstance(entry.fingerprint.content, ItemsContent):
                entry.fingerprint = Fingerprint(entry.fingerprint.kind, entry.fingerprint.content.without_items())

    def record_read(self, path: str, namespace: Namespace) -> bool:
        """Record that workers have read from the notebook's iterator at a path; return False for any other value.

        The path may end with the name of an attribute.
        """
        root = root_name(path).partition(".")[0]
        if not self._is_shared(root, namespace):
            return False
        try:
            if "." in path:
                owner, _, name = path.rpartition(".")
                value = (attributes_of(resolve_path(namespace, owner)) or {}).get(name)
            else:
                value = resolve_path(namespace, path)
        except LookupError:
            return False
        if not is_iterator(value):
            return False
        self._outdated_iterators[id(value)] = value
        return True

    def forget(self, names: Iterable[str] | None = None) -> list[str]:
        """Drop the records of some names, or of all: a cell that uses them sends them again.

        Return the paths below other names to which records of their parts have moved.
        """
        if names is None:
            self._entries.clear()
            self._parts.clear()
            self._aliases.clear()
            self.record_outdated([name for name, value in self._bindings.items() if value is not _ABSENT])
            return []
        names = dict.fromkeys(names)
        for others in self._aliases.values():
            for path in [path for path in others if root_name(path) in names]:
                del others[path]
        lost: dict[str, _Entry] = {}
        for name in names:
            for path in (name, *self._parts.pop(name, ())):
                if (entry := self._entries.pop(path, None)) is not None:
                    lost[path] = entry
        moved: list[str] = []
        for path, entry in lost.items():
            others = self._aliases.pop(path, {})
            successor = next((other for other in others if root_name(other) in self._entries), None)
            if successor is not None and not entry.is_worker_only:
                self._entries[successor] = entry
                self._parts.setdefault(root_name(successor), []).append(successor)
                self._aliases[successor] = {other: None for other in others if other != successor}
                moved.append(successor)
        return moved

    def record_deleted(self, names: Iterable[str]) -> None:
        """Record that the workers have deleted some names."""
        names = list(names)
        self.forget(names)
        for name in names:
            self._bindings.pop(name, None)

    def used_elsewhere(self, names: Iterable[str], namespace: Mapping[str, Any]) -> list[str]:
        """Return those of ``names`` whose shared values have references besides the name and this record."""
        found = []
        for name in names:
            entry = self._entries.get(name)
            if entry is None or entry.is_worker_only or namespace.get(name) is not entry.value:
                continue
            num_own = _OWN_REFERENCES + (self._bindings.get(name) is entry.value)
            if sys.getrefcount(entry.value) > num_own:
                found.append(name)
        return found

    def record_outdated(self, names: Iterable[str]) -> None:
        """Record that the workers' values of some names are out of date even if the notebook's are unchanged."""
        self._bindings.update(dict.fromkeys(names, _SUPERSEDED))

    def release_unused(self, namespace: Mapping[str, Any]) -> None:
        """Drop the records of objects that only these records keep in memory, since the notebook no longer uses them.

        A list or another object that cannot be referenced weakly is kept until its name is sent again.
        """
        for name in self._outdated(namespace):
            entry = self._entries.get(name)
            if entry is None or entry.is_worker_only or self._bindings[name] is not entry.value:
                continue
            try:
                reference = weakref.ref(entry.value)
            except TypeError:
                continue
            entry.value = self._bindings[name] = _SUPERSEDED
            value = reference()
            if value is None:
                self.forget([name])
            else:
                entry.value = self._bindings[name] = value

    def _outdated(self, namespace: Mapping[str, Any]) -> list[str]:
        """Return the workers' names that the notebook has since bound to another object, or deleted."""
        return [name for name, value in self._bindings.items() if namespace.get(name, _ABSENT) is not value]

    def _renamed(self, outdated: Iterable[str], names: Iterable[str], namespace: Namespace) -> list[str]:
        """Return the new names of models, optimizers and schedulers whose ``outdated`` names were rebound or deleted.

        They are sent while the workers still have the old names, so that the workers keep the same objects.
        """
        entries = (self._entries.get(name) for name in outdated)
        lost = {id(entry.value) for entry in entries if entry is not None and is_training_object(entry.value)}
        if not lost:
            return []
        chosen = {*names, *self._bindings}
        return [
            name
            for name, value in dict(namespace).items()
            if id(value) in lost and name not in chosen and not name.startswith("_")
        ]

    def _is_shared(self, name: str, namespace: Mapping[str, Any]) -> bool:
        return name in self._entries and self._entries[name].value is namespace.get(name)

    def _is_in_place(self, path: str, namespace: Mapping[str, Any]) -> bool:
        try:
            return resolve_path(namespace, path) is self._entries[path].value
        except LookupError:
            return False

    def _add(self, name: str, namespace: Namespace, references: ReferenceRecorder, delta: NamespaceDelta) -> bool:
        """Add the value or changes of a name to a delta; return whether an object that others refer to is replaced."""
        value, entry = namespace[name], self._entries.get(name)
        if entry is None or entry.value is not value:
            delta.values[name] = value
            return False
        if entry.is_worker_only:
            return False
        references.look_up_parts(value)
        changes = NamespaceDelta()
        parts = self._parts.get(name, [])
        replaced: list[str] = []
        for path in (name, *parts):
            entry = self._entries[path]
            try:
                fingerprint = _fingerprint(path, entry.value, namespace, references)
            except Exception:
                if not is_below_training_object(path):
                    raise
                replaced.append(path)
                continue
            if fingerprint == entry.fingerprint:
                continue
            if fingerprint is None or entry.fingerprint is None or not fingerprint.can_update(entry.fingerprint):
                if is_below_training_object(path):
                    replaced.append(path)
                    continue
                delta.values[name] = value
                # A prepared model has the forward method that its class had when it was prepared.
                return bool(parts) or is_training_object(value) or is_module_class(value)
            _add_change(changes, path, entry.value, fingerprint, entry.fingerprint, namespace, references)
        if replaced:  # such objects are sent again with the values that refer to them, not with the whole model
            for path in replaced:
                references.pop(id(self._entries[path].value), None)
            self._drop_parts(replaced)
            return self._add(name, namespace, references, delta)
        delta.merge(changes)
        return False

    def _drop_parts(self, paths: Iterable[str]) -> None:
        for path in paths:
            del self._entries[path]
            self._parts[root_name(path)].remove(path)
            self._aliases.pop(path, None)


def _add_change(
    delta: NamespaceDelta,
    path: str,
    value: Any,
    fingerprint: Fingerprint,
    before: Fingerprint,
    namespace: Namespace,
    shared: SharedObjects,
) -> None:
    """Add to a delta the changes that make the receiver's object at ``path``, of the same kind, equal to this one."""
    if is_module(value):
        if fingerprint.content.weights != before.content.weights:
            delta.modules[path] = module_state(value)
        if fingerprint.content.gradients != before.content.gradients:
            delta.gradients[path] = gradient_state(value)
        if fingerprint.content.attributes != before.content.attributes:
            delta.attributes[path] = module_attributes(value, namespace, shared, before.content.attributes)
        if fingerprint.content.hooks != before.content.hooks:
            delta.hooks[path] = changed_module_hooks(value, before.content.hooks)
    elif is_optimizer(value):
        now, known = fingerprint.content, before.content
        has_stepped = (now.tensors, now.numbers) != (known.tensors, known.numbers)
        delta.optimizers[path] = optimizer_state(
            value, namespace, shared, with_tensors=has_stepped, before=before.content
        )
    elif is_scheduler(value):
        delta.schedulers[path] = value.state_dict()
    else:
        content = content_of(value)
        assert content is not None, "a value with a kind has content"
        delta.changed[path] = content[1]
        if (contents := changed_contents(before.content, fingerprint.content, namespace, shared)) is not None:
            delta.items[path] = contents


def _fingerprint(
    path: str, value: Any, namespace: Namespace, shared: SharedObjects, checksums: TensorChecksums | None = None
) -> Fingerprint | None:
    if "@" in path and is_loader(value):
        return content_fingerprint(value, namespace, shared)
    fingerprint = fingerprint_of(value, namespace, shared, checksums)
    if fingerprint is None:
        return fingerprint
    # The workers have prepared their model or optimizer: one with other parts, gradient hooks or methods is sent whole.
    if is_module(value):
        modules, tensors = list(value.modules()), list(value.parameters())
        hooks = tuple(
            id(hook) for item in tensors for hook_dict in gradient_hooks(item).values() for hook in hook_dict.values()
        )
        forwards = [forward for part in modules if (forward := users_forward(part)) is not None]
        own = Identities([*modules, *tensors, *forwards]), hooks
    elif is_optimizer(value):
        own = group_parameters(value), method_ids(value)
    elif is_scheduler(value):  # its state dict has no functions
        referenced = (getattr(value, "optimizer", None), *getattr(value, "lr_lambdas", ()))
        own = (Identities(item for item in referenced if is_optimizer(item) or isinstance(item, types.FunctionType)),)
    else:
        return fingerprint
    return Fingerprint((fingerprint.kind, own), fingerprint.content)


def _find_problems(
    values: Mapping[str, Any], namespace: Namespace, shared: Mapping[int, SharedId], error: SectionError
) -> dict[str, str]:
    problems: dict[str, str] = {}
    for name, value in values.items():
        try:
            dump(value, namespace=namespace, shared=shared)
        except Exception as cause:
            problems[name] = _describe_problem(name, value, cause)
    name = root_name(error.key[1])
    return problems or {name: _describe_problem(name, namespace[name], error.__cause__)}


def _describe_problem(name: str, value: Any, error: BaseException | None) -> str:
    text = "" if error is None else error_text(error)
    return (
        f"`{name}` ({type(value).__module__}.{type(value).__qualname__}) cannot be sent to the workers: "
        f"{type(error).__name__}: {text}. Make it inside the %%accelerate cell, or leave it out of the cell."
    )
