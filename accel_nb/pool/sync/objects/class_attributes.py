"""The attributes of the notebook's classes: data that other values may hold too, and the members of enumerations."""

from __future__ import annotations

import abc
import enum
import types
from collections.abc import Iterator, Mapping
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import is_module_class

_MADE_BY_PYTHON = frozenset(
    {"__dict__", "__weakref__", "__firstlineno__", "__annotate_func__", "__annotations_cache__"}
)
_DESCRIBED = (types.MemberDescriptorType, types.GetSetDescriptorType)


def is_notebook_class(value: Any) -> bool:
    """Return whether a value is a class that a cell defines."""
    return isinstance(value, type) and value.__module__ == "__main__"


def is_local_class(value: Any) -> bool:
    """Return whether a value is a class that a function of a cell defines, which no name may refer to."""
    return is_notebook_class(value) and "<locals>" in value.__qualname__ and class_content(value) is not None


def is_enum_member(value: Any) -> bool:
    """Return whether a value is a member of an enumeration of the notebook."""
    return isinstance(value, enum.Enum) and is_notebook_class(type(value))


def class_parts(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the members of an enumeration, and the attributes of a class that are data, each with its path step.

    Methods and a library's descriptors are a part of the class, with which they are sent.
    """
    if issubclass(kind, enum.Enum):
        yield from ((f"member:{name}", member) for name, member in kind.__members__.items())
        return
    for name, item in vars(kind).items():
        is_descriptor = hasattr(type(item), "__get__") and not is_notebook_class(type(item))
        if not is_descriptor and name.isidentifier() and not name.startswith("__"):
            yield f"attribute:{name}", item


def class_content(kind: type) -> dict[str, Any] | None:
    """Return the members of a class, for `set_class_content`; None if it is sent whole.

    Classes of modules are sent whole, since a prepared model keeps the methods that its class had, and so are abstract
    classes, which have registries.
    """
    if is_module_class(kind) or issubclass(kind, enum.Enum) or isinstance(kind, abc.ABCMeta):
        return None
    own = {name: item for name, item in vars(kind).items() if name not in _MADE_BY_PYTHON}
    return {name: item for name, item in own.items() if not isinstance(item, _DESCRIBED)}


def set_class_content(kind: type, content: Mapping[str, Any]) -> None:
    """Set the members of a class, and delete others that code can have set."""
    own = class_content(kind) or {}
    for name, item in content.items():
        if own.get(name) is not item:
            setattr(kind, name, item)
    for name in own.keys() - content.keys():
        if not name.startswith("__"):
            delattr(kind, name)
