"""Objects whose class defines ``__getstate__``: the state that is sent, and what it leaves out.

Objects of classes of the notebook keep what the state leaves out, such as open files. The class of a library, as those
of data frames and of estimators, makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import attributes_of, set_attributes
from accel_nb.pool.sync.reductions.widgets import is_widget

_INTERLINKED = frozenset({"matplotlib", "mpl_toolkits"})
"""Packages whose objects refer to each other in many ways, and are sent as a whole."""


@dataclass(frozen=True, slots=True)
class ObjectState:
    """The result of ``__getstate__``, and the names of the attributes that are set and that it leaves out."""

    state: Any
    left_out: frozenset[str]


def has_own_state(value: Any) -> bool:
    """Return whether the class of an object defines ``__getstate__``, and no other way of pickling."""
    kind = type(value)
    return (
        (_is_of_notebook(kind) or _is_of_library(kind))
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and attributes_of(value) is not None
        and not is_widget(value)
    )


def _is_of_notebook(kind: type) -> bool:
    return getattr(getattr(kind, "__getstate__", None), "__module__", None) == "__main__"


def _is_of_library(kind: type) -> bool:
    has_state = getattr(kind, "__getstate__", None) is not getattr(object, "__getstate__", None)
    return has_state and kind.__module__.partition(".")[0] not in _INTERLINKED


def object_state(value: Any) -> ObjectState:
    """Return the state of an object, for `set_object_state`. Raise the errors of its ``__getstate__``."""
    state = _state_of(value)
    return ObjectState(state, frozenset(_left_out(value, state)))


def attributes_in_state(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that its state contains as they are; none if its ``__getstate__`` fails."""
    try:
        state = _state_of(value)
    except Exception:  # the user's code may raise anything; the value is then sent, or named, as a whole
        return {}
    if not isinstance(state, Mapping):
        return {}
    return {name: item for name, item in (attributes_of(value) or {}).items() if state.get(name) is item}


def set_object_state(value: Any, content: ObjectState) -> None:
    """Set the state of an object as if it was unpickled."""
    before = dict(attributes_of(value) or {})
    try:
        set_attributes(value, {})
        _set_state(value, content.state)
    except BaseException:
        set_attributes(value, before)
        raise


def unsent_attributes(value: Any, content: ObjectState) -> dict[str, Any]:
    """Return attributes that ``__getstate__`` leaves out and that the sender of ``content`` has not set either."""
    if not _is_of_notebook(type(value)):
        return {}
    left_out = _left_out(value, _state_of(value))
    return {name: item for name, item in left_out.items() if name not in content.left_out}


def _state_of(value: Any) -> Any:
    """Return the result of ``__getstate__``, with the old values of attributes that it changes, and restore these."""
    before = dict(attributes_of(value) or {})
    state = value.__getstate__()
    after = attributes_of(value) or {}
    changed = {name: item for name, item in before.items() if after.get(name) is not item}
    if changed:
        set_attributes(value, changed, is_complete=False)
    return {**state, **changed} if changed and isinstance(state, Mapping) else state


def _left_out(value: Any, state: Any) -> dict[str, Any]:
    """Return the attributes that a state lacks, or that are None in it, as open files are."""
    if not isinstance(state, Mapping):
        return {}
    own = attributes_of(value) or {}
    return {name: item for name, item in own.items() if item is not None and state.get(name) is None}


def _set_state(value: Any, state: Any) -> None:
    if state is None:
        return
    if hasattr(type(value), "__setstate__"):
        value.__setstate__(state)
        return
    own, slots = state if isinstance(state, tuple) else (state, None)
    set_attributes(value, {**(own or {}), **(slots or {})}, is_complete=False)
