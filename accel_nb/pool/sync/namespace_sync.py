"""The data that is sent with a cell: new names with their values, and the changes of shared names.

A `NamespaceDelta` is serialized on one side and applied on the other, in either direction. Objects that the receiver
holds are changed in place, so that references to them stay valid: modules, optimizers, schedulers, containers, and
the parts of functions, bound methods and objects of the notebook. A path identifies such an object: a name and the
accesses below it, such as ``step@closure:model`` (`accel_nb.pool.sync.paths.object_paths`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from accel_nb.errors import error_text
from accel_nb.pool.payload import BufferPayload, PayloadFactory
from accel_nb.pool.sync.change_detection import (
    set_module_attributes,
    set_module_state,
)
from accel_nb.pool.sync.contents.content_kinds import ObjectAttributes, set_content
from accel_nb.pool.sync.contents.long_items import changeable_items
from accel_nb.pool.sync.imported_attributes import ImportedAttributes
from accel_nb.pool.sync.long_containers import set_item_contents
from accel_nb.pool.sync.objects.module_gradients import set_gradients
from accel_nb.pool.sync.objects.module_hooks import set_changed_module_hooks
from accel_nb.pool.sync.objects.module_parts import resolve_parts, set_module_parts
from accel_nb.pool.sync.objects.object_kinds import (
    attributes_of,
    is_module,
    is_plain_array,
    is_sparse,
    is_tensor,
    is_training_object,
)
from accel_nb.pool.sync.objects.shared_ids import SharedId
from accel_nb.pool.sync.objects.user_hooks import next_number, reserve_numbers
from accel_nb.pool.sync.optimizer_states import set_optimizer_state
from accel_nb.pool.sync.paths.object_paths import resolve_path
from accel_nb.pool.sync.stream.pickling import copyable_values
from accel_nb.pool.sync.stream.sections import dump_sections, load_sections

Namespace = dict[str, Any]

_BUILT_IN = (list, tuple, dict, set, frozenset, str, bytes, int, float, complex, bool, type(None))


@dataclass(slots=True)
class NamespaceDelta:
    """Changes to a namespace: new values by name, and changes of objects that the receiver holds by path."""

    values: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)
    """The new content of objects that were changed in place."""
    items: dict[str, Any] = field(default_factory=dict)
    """The contents of the items of containers with too many items for a path each (`changed_contents`)."""
    structures: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """For each nn.Module whose structure changed: by submodule path, its own parameters, buffers and submodules."""
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    gradients: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The gradients of modules."""
    attributes: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Attributes of modules other than parameters, buffers, `training` and `requires_grad`, by their owner's path."""
    hooks: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """The user's hooks of modules."""
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    schedulers: dict[str, dict[str, Any]] = field(default_factory=dict)
    rng: Any = None
    """Generator states, as returned by `accel_nb.runtime.rng.capture_cpu`."""
    removed: tuple[str, ...] = ()
    """Names whose old values the receiver must delete."""

    def __bool__(self) -> bool:
        return any(getattr(self, item.name) for item in fields(self))

    @property
    def paths(self) -> list[str]:
        """The paths at which the receiver's objects equal the sender's after the delta is applied."""
        return list(
            dict.fromkeys(
                [
                    *(*self.values, *self.changed, *self.structures, *self.modules, *self.gradients, *self.attributes),
                    *(*self.hooks, *self.optimizers, *self.schedulers),
                ]
            )
        )

    def changes_by_path(self) -> list[dict[str, Any]]:
        """Return the fields that hold changes by path: all but the new values of names."""
        return [getattr(self, name) for name in _FIELDS_BY_PATH if name != "values"]

    def merge(self, other: NamespaceDelta) -> None:
        """Add the changes of another delta; its generator states and removed names are left out."""
        for name in _FIELDS_BY_PATH:
            getattr(self, name).update(getattr(other, name))

    def replace_content(self, other: NamespaceDelta) -> None:
        """Replace the content by that of another delta."""
        for item in fields(self):
            setattr(self, item.name, getattr(other, item.name))

    def remove(self, path: str) -> None:
        """Remove the changes at a path."""
        for name in _FIELDS_BY_PATH:
            getattr(self, name).pop(path, None)

    def pack(
        self,
        namespace: Namespace,
        shared: Mapping[int, SharedId],
        payloads: PayloadFactory,
        *,
        kept_names: Collection[str] | None = None,
        has_gradient: Callable[[Any], bool] | None = None,
    ) -> BufferPayload:
        """Serialize into a payload.

        Raise SectionError if a value cannot be copied; the last element of the error's ``key`` is the value's path.

        ``kept_names`` and ``has_gradient`` are as in `dump_sections`.
        """
        sections: dict[tuple[str, str], Any] = {("head", ""): (self.rng, self.removed, next_number())}
        for field_name in _FIELDS_BY_PATH:
            changes = getattr(self, field_name)
            # Values that may fail to be rebuilt come last: if one fails, so do later ones that share an object with it.
            for path, value in sorted(changes.items(), key=lambda item: _packing_order(item[1])):
                sections[field_name, path] = value
        return payloads.write(
            *dump_sections(
                sections, namespace=namespace, shared=shared, kept_names=kept_names, has_gradient=has_gradient
            )
        )

    @classmethod
    def unpack(cls, payload: BufferPayload, namespace: Namespace) -> tuple[NamespaceDelta, dict[str, Exception]]:
        """Read a delta from a payload; references to shared objects are looked up in ``namespace``.

        Return the delta, and by path the error of each part that could not be rebuilt.
        """
        stream, buffers = payload.read()
        sections, errors = load_sections(stream, buffers, namespace=namespace)
        rng, removed, number = sections.pop(("head", ""))
        reserve_numbers([number - 1])
        delta = cls(rng=rng, removed=removed)
        for (field_name, path), value in sections.items():
            getattr(delta, field_name)[path] = value
        return delta, {path: error for (_, path), error in errors.items()}

    def apply(self, namespace: Namespace) -> dict[str, Exception]:
        """Apply the changes; return by path the error of each that failed, which does not affect the others.

        Paths are resolved before the first change.
        """
        found: dict[str, Any] = {}
        errors: dict[str, Exception] = {}
        parts: dict[str, Any] = {}
        setters: tuple[tuple[dict[str, Any], Callable[[Any, Any], object]], ...] = (
            (parts, lambda _, found_parts: set_module_parts(found_parts)),
            (self.items, lambda value, contents: set_item_contents(changeable_items(value), contents)),
            (self.changed, partial(_set_content, namespace)),
            (self.modules, set_module_state),
            (self.gradients, set_gradients),
            (self.attributes, set_module_attributes),
            (self.hooks, set_changed_module_hooks),
            (self.optimizers, set_optimizer_state),
            (self.schedulers, lambda scheduler, state: scheduler.load_state_dict(state)),
        )
        for path in dict.fromkeys([*self.structures, *(path for contents, _ in setters for path in contents)]):
            try:
                found[path] = resolve_path(namespace, path)
            except LookupError as error:
                errors[path] = error
        # Modules may share submodules: all are found before one of them has other parts.
        for path in [path for path in self.structures if path in found]:
            try:
                parts[path] = resolve_parts(found[path], self.structures[path])
            except LookupError as error:
                errors[path] = error
                del found[path]
        for contents, setter in setters:
            for path in [path for path in contents if path in found]:
                try:
                    setter(found[path], contents[path])
                except Exception as error:  # classes of the user may raise anything
                    errors[path] = error
        # Where a name has a new value too, its old object was changed only for other references to that object, which
        # need not exist: such an error is ignored.
        errors = {path: error for path, error in errors.items() if path not in self.values}
        namespace.update(self.values)
        for name in self.removed:
            namespace.pop(name, None)
        if self.rng is not None:
            from accel_nb.runtime import rng

            rng.restore_cpu(self.rng)
        return errors


def _set_content(namespace: Namespace, value: Any, content: Any) -> None:
    """Set the content of a value; attributes that cannot be copied stay, since they are never sent."""
    if isinstance(content, ObjectAttributes) and content.is_complete:
        own = attributes_of(value) or {}
        missing = {name: own[name] for name in own.keys() - content.values.keys()}
        if missing:
            known = {name: item for name, item in missing.items() if name not in content.left_out}
            stay = missing.keys() - copyable_values(known, namespace, {}).keys()
            content = ObjectAttributes({**content.values, **{name: own[name] for name in stay}})
    set_content(value, content)


def describe_failures(errors: Mapping[str, Exception], where: str) -> dict[str, str]:
    """Return by path one line with the reason why a value could not be rebuilt."""
    return {
        path: f"cannot be rebuilt {where}: {type(error).__name__}: {error_text(error)}"
        for path, error in errors.items()
    }


_FIELDS_BY_PATH = (
    *("structures", "modules", "gradients", "optimizers", "schedulers"),
    *("values", "items", "changed", "attributes", "hooks"),
)
"""The fields of a `NamespaceDelta` that are dicts by path, in the order in which they are packed."""


def _packing_order(value: Any) -> tuple[int, int]:
    """Return a sort key: values that others refer to first, values that may fail to be rebuilt last.

    Of tensors and arrays the larger ones come first: a view of part of another's memory finds that memory sent.
    """
    if isinstance(value, ImportedAttributes):
        return -1, 0
    if isinstance(value, type):
        return 0, 0
    if is_training_object(value):
        return (1 if is_module(value) else 2), 0
    if (is_tensor(value) and not is_sparse(value)) or is_plain_array(value):
        return 3, -value.nbytes
    return (3 if type(value) in _BUILT_IN or type(value).__module__ == "numpy" else 4), 0
