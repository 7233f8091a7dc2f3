"""Objects that are defined by what they refer to: plain objects by their attributes, functions by their closures."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from typing import Any

from accel_nb.pool.sync.objects.class_attributes import is_enum_member
from accel_nb.pool.sync.objects.object_kinds import attributes_of, is_loader, is_tensor, is_training_object
from accel_nb.pool.sync.reductions.custom_operators import is_custom_operator
from accel_nb.pool.sync.reductions.process_objects import is_of_process
from accel_nb.pool.sync.reductions.weak_collections import is_weak_collection

ATOMIC_TYPES = (str, int, float, complex, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType)
"""Types of values that refer to no object of the notebook, other than its classes and the methods of its objects."""

_DICTS = (dict, OrderedDict, defaultdict, Counter)


def is_plain_object(value: Any) -> bool:
    """Return whether a value is defined by its attributes: these are what pickle would save.

    So is a member of an enumeration, which pickle saves by its value. What the class's ``__setstate__`` does to
    attributes that arrive is not needed: they are those of the sender.
    """
    kind = type(value)
    if is_enum_member(value):
        return not isinstance(value, ATOMIC_TYPES)
    return (
        attributes_of(value) is not None
        and not isinstance(value, ATOMIC_TYPES)
        and not is_of_process(value)
        and not is_weak_collection(value)
        and not isinstance(value, types.FunctionType | types.MethodType | functools.partial | list | tuple | dict | set)
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ in (object.__reduce__, types.SimpleNamespace.__reduce__)
        and _has_usual_state(kind)
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and not hasattr(kind, "_accel_nb_reduce")
        and not is_training_object(value)
        and not is_loader(value)
        and not is_tensor(value)
        and not is_custom_operator(value)
    )


def _has_usual_state(kind: type) -> bool:
    """Return whether the state of a class's objects are their attributes, as it is of frozen dataclasses with slots."""
    own = getattr(kind, "__getstate__", None)
    return own is getattr(object, "__getstate__", None) or getattr(own, "__module__", None) == "dataclasses"


def is_known_dict(value: Any) -> bool:
    """Return whether a value is a dict of a class that is copied by its items and attributes."""
    kind = type(value)
    if not isinstance(value, dict):
        return False
    is_usual = kind.__reduce_ex__ is object.__reduce_ex__ and any(kind.__reduce__ is base.__reduce__ for base in _DICTS)
    return is_usual or kind.__module__ == "__main__"


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy, also of a subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_builtin_method(value: Any) -> bool:
    """Return whether a value is a method of an object of a built-in type, such as the ``append`` of a list."""
    return isinstance(value, types.BuiltinMethodType | types.MethodWrapperType) and not isinstance(
        value.__self__, types.ModuleType | type | None
    )


def is_pickled_by_value(function: types.FunctionType) -> bool:
    """Return whether a function is sent with its code: that of the notebook, and one that another function made."""
    return function.__module__ == "__main__" or "<" in function.__qualname__
