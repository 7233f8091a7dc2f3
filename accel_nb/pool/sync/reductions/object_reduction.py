"""Objects in a pickle stream that pickle copies wrongly or not at all: exceptions, inverse transforms, and others."""

from __future__ import annotations

import copyreg
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import attributes_of


def _cached_for_class(function: Callable[[type], bool]) -> Callable[[type], bool]:
    """Cache the results of a function while the class exists: the own class of a prepared model refers to the model."""
    known: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def find(kind: type) -> bool:
        if (found := known.get(kind)) is None:
            found = known[kind] = function(kind)
        return found

    return find


def is_inverse_transform(value: Any) -> bool:
    """Return whether a value is the inverse of a `torch.distributions` transform: pickle leaves out the transform."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is _inverse_transform_type(torch)


@functools.cache
def _inverse_transform_type(torch: Any) -> type:
    return type(torch.distributions.ExpTransform().inv)


def reduce_inverse(inverse: Any) -> Any:
    """Reduce the inverse of a transform: as that of the transform's copy, which may contain it, as Pyro has it."""
    transform = inverse.inv
    if any(value is inverse for value in vars(transform).values()):
        return object.__new__, (type(inverse),), vars(inverse), None, None, _set_inverse
    return _invert, (transform,)


def _invert(transform: Any) -> Any:
    return transform.inv


def _set_inverse(inverse: Any, state: dict[str, Any]) -> None:
    vars(inverse).update(state)
    transform = inverse.inv
    # Each holds the other under the same name; torch leaves this out of the transform's state.
    vars(transform).update({name: inverse for name, value in state.items() if value is transform})


_WITH_FIELDS = (OSError, ImportError, UnicodeError, SyntaxError, StopIteration, SystemExit, AttributeError, NameError)
"""Exceptions whose built-in ``__init__`` stores arguments outside of ``args``."""


def is_rebuilt_by_init(value: Any) -> bool:
    """Return whether a value is an exception whose own ``__init__`` pickle calls with ``args``, which may not fit."""
    kind = type(value)
    return (
        isinstance(value, BaseException)
        and isinstance(kind.__init__, types.FunctionType)
        and kind.__reduce__ is BaseException.__reduce__
        and kind.__reduce_ex__ is BaseException.__reduce_ex__
        and not issubclass(kind, _WITH_FIELDS)
    )


def reduce_exception(error: BaseException) -> Any:
    """Reduce an exception to its ``args`` and attributes; the receiver does not call ``__init__``."""
    return copyreg.__newobj__, (type(error), *error.args), attributes_of(error) or None  # type: ignore[attr-defined]


def probes_attributes(kind: type) -> bool:
    """Return whether pickle, looking for ``__setstate__``, calls a ``__getattr__`` that may need the state."""
    return hasattr(kind, "__getattr__") and not hasattr(kind, "__setstate__")


def reduce_by_class(value: Any) -> Any:
    """Return the reduction of an object; Python 3.10 looks up a ``__getstate__`` in it that its class lacks.

    A ``__getattr__`` that looks up items of a dict raises KeyError then.
    """
    kind = type(value)
    is_usual = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    names = ("__getstate__", "__getnewargs__", "__getnewargs_ex__")
    if not is_usual or not probes_attributes(kind) or any(hasattr(kind, name) for name in names):
        return value.__reduce_ex__(5)
    own = vars(value) if kind.__dictoffset__ else {}
    slots = {name: item for name, item in (attributes_of(value) or {}).items() if name not in own}
    listed = iter(list.copy(value)) if isinstance(value, list) else None
    mapped = iter(dict.items(value)) if isinstance(value, dict) else None
    return copyreg.__newobj__, (kind,), (own, slots), listed, mapped  # type: ignore[attr-defined]


def with_own_state(reduced: Any) -> Any:
    """Extend the reduction of an object by a step that sets its state without reading an attribute of the object."""
    if not isinstance(reduced, tuple) or len(reduced) < 3 or reduced[2] is None:
        return reduced
    return *(*reduced, None, None)[:5], _set_own_state


def _set_own_state(value: Any, state: Any) -> None:
    own, slots = state if isinstance(state, tuple) else (state, None)
    if own:
        vars(value).update(own)
    for name, item in (slots or {}).items():
        object.__setattr__(value, name, item)


@_cached_for_class
def is_made_with_arguments(kind: type) -> bool:
    """Return whether ``__new__`` of a class needs arguments that pickle, which calls it with none, does not have."""
    if issubclass(kind, type) or not isinstance(kind.__new__, types.FunctionType) or hasattr(kind, "__getnewargs__"):
        return False
    if hasattr(kind, "__getnewargs_ex__") or kind.__reduce_ex__ is not object.__reduce_ex__:
        return False
    _, *others = inspect.signature(kind.__new__).parameters.values()
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(other.kind in fixed and other.default is inspect.Parameter.empty for other in others)


def reduce_without_new(reduced: Any) -> Any:
    """Return the reduction of an object that is made without calling ``__new__`` of its class."""
    return (object.__new__, *reduced[1:]) if reduced[0] is copyreg.__newobj__ else reduced  # type: ignore[attr-defined]


@_cached_for_class
def may_change_itself(kind: type) -> bool:
    """Return whether a class has a ``__getstate__`` of its own, which may write to the object."""
    own = getattr(kind, "__getstate__", None)
    is_own = isinstance(own, types.FunctionType) and not (own.__module__ or "").startswith("torch.")
    return is_own and kind.__reduce_ex__ is object.__reduce_ex__


def reduce_unchanged(value: Any) -> Any:
    """Reduce an object, and restore attributes that its ``__getstate__`` has changed; the copy gets these too.

    Pyro's guides lose their model by it.
    """
    before = dict(getattr(value, "__dict__", ()))
    reduced = reduce_by_class(value)
    after = getattr(value, "__dict__", {})
    changed = {name: item for name, item in before.items() if after.get(name) is not item}
    if not changed:
        return reduced
    after.update(changed)
    kept = {name: item for name, item in changed.items() if not isinstance(item, weakref.ref)}
    make, arguments, state, listed, mapped = (*reduced, None, None, None)[:5]
    return make, arguments, (state, kept), listed, mapped, _set_state_and_more


def _set_state_and_more(value: Any, content: tuple[Any, Mapping[str, Any]]) -> None:
    state, kept = content
    if hasattr(type(value), "__setstate__"):
        value.__setstate__(state)
    elif state is not None:
        _set_own_state(value, state)
    if kept:
        vars(value).update(kept)


@_cached_for_class
def adds_items_itself(kind: type) -> bool:
    """Return whether pickle adds the items of a list or dict by a method of its class, which may need the state."""
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return False
    names = ("append", "extend") if issubclass(kind, list) else ("__setitem__",) if issubclass(kind, dict) else ()
    return any(isinstance(getattr(kind, name), types.FunctionType) for name in names)


def reduce_with_items(reduced: Any) -> Any:
    """Return the reduction of a list or dict whose items are set as they are, after its state."""
    make, arguments, state, listed, mapped = (*reduced, None, None, None)[:5]
    return make, arguments, (state, list(listed or ()), dict(mapped or ())), None, None, _set_state_and_items


def _set_state_and_items(value: Any, content: tuple[Any, list[Any], dict[Any, Any]]) -> None:
    state, listed, mapped = content
    _set_state_and_more(value, (state, {}))
    if isinstance(value, list):
        list.extend(value, listed)
    else:
        dict.update(value, mapped)
