"""Attributes that a notebook has set on imported modules and classes, such as a replaced method.

Workers import the same modules: attributes that the notebook has changed since are sent and set there.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import operator
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from accel_nb.errors import error_text
from accel_nb.pool.sync.contents.content_kinds import content_of, set_content
from accel_nb.pool.sync.contents.plain_objects import is_plain_object
from accel_nb.pool.sync.objects.object_kinds import is_plain_array, is_tensor, is_training_object
from accel_nb.pool.sync.objects.shared_ids import IMPORTED, SharedObjects
from accel_nb.pool.sync.stream.pickling import dump
from accel_nb.runtime.process.user_code import is_user_module

CONTAINERS = (dict, list, set)
"""Types of values whose content code changes in place, as by ``config.options["lr"] = 0.1``."""

ITSELF = "*"
MODULE_END = "/"
"""The end of a module's name at the start of a dotted text, for attributes that the module's own code sets."""

_MISSING = object()
_EXCLUDED = frozenset(
    {
        "IPython",
        "__main__",
        "accel_nb",
        "builtins",
        "ipykernel",
        "logging",
        "matplotlib",
        "os",
        "signal",
        "sys",
        "warnings",
    }
)
"""Packages whose state belongs to a process, or is sent as a setting (`accel_nb.notebook.session.process_settings`)."""


class AssignedAttribute(NamedTuple):
    """An attribute that code may set: the object as dotted text, and the attribute's name, None if it is unknown.

    `ITSELF` in place of a name: code calls a method of the object, which may change it.
    """

    base: str
    name: str | None = None

    def to_text(self) -> str:
        """Return the attribute as text, for a message."""
        return f"{self.base}:{self.name or ''}"

    @classmethod
    def from_text(cls, text: str) -> AssignedAttribute:
        """Return the attribute that `to_text` returned as ``text``."""
        base, _, name = text.partition(":")
        return cls(base, name or None)


EXTENDED_CLASSES = frozenset(
    AssignedAttribute(f"{module}{MODULE_END}.{name}")
    for module, name in (
        ("pandas.core.frame", "DataFrame"),
        ("pandas.core.series", "Series"),
        ("pandas.core.groupby.groupby", "GroupBy"),
        ("pandas.core.groupby.generic", "DataFrameGroupBy"),
        ("pandas.core.groupby.generic", "SeriesGroupBy"),
        ("pandas.core.window.rolling", "Rolling"),
        ("pandas.core.window.expanding", "Expanding"),
    )
)
"""Classes to which functions of other packages add methods when the notebook calls them, such as ``tqdm.pandas()``."""


class ImportedPath(NamedTuple):
    """The place of an attribute: a module's name, and the dotted path of the attribute in it."""

    module: str
    path: str

    def to_text(self) -> str:
        """Return the attribute's full name."""
        return ".".join(self)


class Original:
    """The value of an attribute that the module itself defines, which code has put back in the place of another one.

    It would be sent by its name, under which the receiver has the other one.
    """


_originals: dict[ImportedPath, Any] = {}
"""The values that attributes of this process's modules had before `_set_attributes` replaced them."""


@dataclass
class ImportedAttributes:
    """Attributes by place; unpickling sets them in the receiving process."""

    values: dict[ImportedPath, Any]

    def __reduce__(self) -> Any:
        found: list[tuple[ImportedPath, type | None, Any]] = []
        for place, value in self.values.items():
            if _has_same_identity(value):
                found.append((place, type(value), content_of(value)))
            else:
                found.append((place, None, Original if _is_original(value, place) else value))
        return _set_attributes, (found,)

    def ids(self) -> SharedObjects:
        """Return the ids of objects to which other values refer as to the receiver's objects at the same places."""
        return SharedObjects(
            {
                id(value): (IMPORTED, place.module + MODULE_END, place.path)
                for place, value in self.values.items()
                if _has_same_identity(value)
            }
        )


def _set_attributes(values: list[tuple[ImportedPath, type | None, Any]]) -> ImportedAttributes:
    """Set attributes; values that code changes in place are updated in place, as other names may be bound to them.

    Attributes of modules that cannot be imported here are left out: code that uses such a module gets Python's error.
    """
    found: dict[ImportedPath, Any] = {}
    for place, kind, value in values:
        path, _, name = place.path.rpartition(".")
        try:
            imported = importlib.import_module(place.module)
        except Exception:  # a module may raise anything
            continue
        owner = operator.attrgetter(path)(imported) if path else imported
        current = getattr(owner, name, None)
        if kind is not None:
            if type(current) is not kind:
                current = copyreg.__newobj__(kind)  # type: ignore[attr-defined]
                setattr(owner, name, current)
            set_content(current, value[1])
        else:
            if value is Original:
                value = _originals.get(place, current)
            elif _is_original(current, place):
                _originals[place] = current
            content = content_of(value)
            old_content = content_of(current) if is_changed_in_place(value) else None
            if old_content is not None and content is not None and old_content[0] == content[0]:
                set_content(current, content[1])
            else:
                setattr(owner, name, value)
        found[place] = getattr(owner, name)
    return ImportedAttributes(found)


def _is_original(value: Any, place: ImportedPath) -> bool:
    """Return whether a value is the function that the module defines at a place."""
    return isinstance(value, types.FunctionType) and (value.__module__, value.__qualname__) == place


def _has_same_identity(value: Any) -> bool:
    return type(value) in CONTAINERS or _is_of_user(value)


def is_changed_in_place(value: Any) -> bool:
    """Return whether code may change a value in place: a container, tensor, array or object of the user's class."""
    return isinstance(value, CONTAINERS) or is_tensor(value) or is_plain_array(value) or _is_of_user(value)


def describe_copy_problem(value: Any, namespace: dict[str, Any]) -> str | None:
    """Return why a value cannot be copied to another process, or None if it can."""
    try:
        dump(value, namespace=namespace, shared={})
    except Exception as error:  # a value's own reduction may raise anything
        return f"cannot be copied: {type(error).__name__}: {error_text(error)}"
    return None


def read_assigned(assigned: Iterable[AssignedAttribute], namespace: Mapping[str, Any]) -> dict[ImportedPath, Any]:
    """Return by place the present values of attributes of imported modules and classes.

    Of an object whose attribute is not known by name, these are the functions and classes that a notebook defines, and
    the methods that another package has added to a class. A list, dictionary or set of one of the user's modules is
    returned whole, and so is an object of the user's classes.
    """
    found: dict[ImportedPath, Any] = {}
    for base, name in assigned:
        place, owner = _resolve(base, namespace)
        if place is None or place.module.partition(".")[0] in _EXCLUDED:
            continue
        prefix = f"{place.path}." if place.path else ""
        if name == ITSELF:
            if is_user_module(place.module) and _is_of_user(owner):
                found[place] = owner
        elif name is not None:
            value = getattr(owner, name, _MISSING) if not isinstance(owner, type) else vars(owner).get(name, _MISSING)
            is_sent_separately = isinstance(value, types.ModuleType) or is_training_object(value)
            if value is not _MISSING and not is_sent_separately:  # a module as of torch.nn.init.zeros_()
                found[ImportedPath(place.module, prefix + name)] = value
        elif isinstance(owner, type | types.ModuleType):
            for key, value in list(vars(owner).items()):
                if _is_from_notebook(value) or (isinstance(owner, type) and _is_added(value, owner)):
                    found[ImportedPath(place.module, prefix + key)] = value
        elif isinstance(owner, CONTAINERS) and is_user_module(place.module) and not place.path.endswith("__"):
            found[place] = owner
    return found


def imported_under_names(names: Iterable[str], namespace: Mapping[str, Any]) -> list[AssignedAttribute]:
    """Return the attributes of the user's modules that names are bound to, as after ``from config import settings``.

    Only containers and objects of the user's classes count: their copies would not follow changes of the module's
    object.
    """
    public = [name for name in names if name in namespace and not name.startswith("_")]  # not __builtins__
    values = {name: namespace[name] for name in public if _has_same_identity(namespace[name])}
    if not values:
        return []
    modules = [(name, vars(module)) for name, module in list(sys.modules.items()) if _is_user_file(name, module)]
    return [
        AssignedAttribute(module + MODULE_END, name)
        for module, attributes in modules
        for name, value in values.items()
        if attributes.get(name) is value
    ]


def _is_user_file(name: str, module: Any) -> bool:
    return name != "__main__" and type(module) is types.ModuleType and is_user_module(name) and _is_imported(module)


def _resolve(base: str, namespace: Mapping[str, Any]) -> tuple[ImportedPath | None, Any]:
    """Return the place of the object that a dotted name means, None if it is in no imported module, and the object."""
    module, is_module, dotted = base.rpartition(MODULE_END)
    root, *steps = dotted.split(".")
    value = sys.modules.get(module) if is_module else namespace.get(root)
    place = _find_place(value)
    for step in steps:
        if place is None:
            return None, None
        try:
            value = getattr(value, step)
        except Exception:  # a lazy attribute may raise anything
            return None, None
        place = _find_place(value) or ImportedPath(place.module, f"{place.path}.{step}" if place.path else step)
    return place, value


def _find_place(value: Any) -> ImportedPath | None:
    """Return the place of an imported module or class; None for one that code has made, which workers cannot import."""
    if isinstance(value, types.ModuleType):
        return ImportedPath(value.__name__, "") if _is_imported(value) else None
    if not isinstance(value, type) or "<" in value.__qualname__:
        return None
    module = sys.modules.get(value.__module__)
    try:
        found = operator.attrgetter(value.__qualname__)(module)
    except AttributeError:
        return None
    return ImportedPath(value.__module__, value.__qualname__) if found is value and _is_imported(module) else None


def _is_imported(module: Any) -> bool:
    return getattr(module, "__spec__", None) is not None and sys.modules.get(module.__name__) is module


def _is_of_user(value: Any) -> bool:
    """Return whether a value is an object of one of the user's classes that is defined by its attributes."""
    return is_user_module(type(value).__module__) and not isinstance(value, type) and is_plain_object(value)


def _is_from_notebook(value: Any) -> bool:
    value = _function_of(value)
    return issubclass(type(value), type | types.FunctionType) and value.__module__ == "__main__"


def _is_added(value: Any, owner: type) -> bool:
    """Return whether a function of another package has added an attribute to a class, after the class body."""
    value = _function_of(value)
    if type(value) is not types.FunctionType or "<locals>" not in value.__qualname__ or not value.__module__:
        return False
    return value.__module__.partition(".")[0] != owner.__module__.partition(".")[0]


def _function_of(value: Any) -> Any:
    """Return the function in a descriptor or a partial call, and any other value itself.

    The class is not asked of the value: an attribute of a module that is deprecated may warn of that.
    """
    kind = type(value)
    if issubclass(kind, staticmethod | classmethod):
        return value.__func__
    if issubclass(kind, property):
        return value.fget
    return value.func if issubclass(kind, functools.partial) else value
