"""Changing how one object behaves without changing the object: a subclass made for the instance.

The object keeps its identity, its attributes and the name of its class. Copying or pickling it gives the plain class
back, and the pickle stream is that of a plain object: nothing of ours reaches a file or another process.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from accel_nb.errors import MisuseError
from accel_nb.precision.half import cast_floats
from accel_nb.precision.policy import Precision
from accel_nb.runtime.tensors.instance_class import PLAIN_CLASS, make_instance_class

T = TypeVar("T")

_OWN_FORWARD = "_accel_nb_own_forward"
_CLASS: Any = vars(object)["__class__"]


def specialise(instance: T, methods: dict[str, Callable[..., Any]], plain: type[T] | None = None) -> T:
    """Give one instance methods of its own, in place; `restore` takes them away again.

    ``plain`` is the class that it shows and is given back; none given: the one that it has.
    """
    base = type(instance)
    plain = plain or base
    reduce = methods.get("__reduce_ex__", reduce_plainly)
    pickled: weakref.ref[_Pickled] | None = None

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        nonlocal pickled
        reduced = reduce(self, protocol)
        if not _checks_class(reduced):
            return reduced
        reduction = _Reduction(reduced)
        reduction.pickled = _Pickled(reduced[1][0])
        pickled = weakref.ref(reduction.pickled)
        return reduction

    def get_class(self: Any) -> type:
        held = None if pickled is None else pickled()
        return _CLASS.__get__(self) if held is None else held.kind

    body: dict[str, Any] = {"__class__": property(get_class, _set_class)}
    if hasattr(plain, "__deepcopy__"):
        body["__deepcopy__"] = lambda self, memo: _as_plain(self, lambda: copy.deepcopy(self, memo))
    if hasattr(plain, "__copy__"):
        body["__copy__"] = lambda self: _as_plain(self, lambda: copy.copy(self))
    body.update(methods, __reduce_ex__=__reduce_ex__)
    try:
        _set_class(instance, make_instance_class(base, plain, body))
    except TypeError as error:
        raise MisuseError(
            f"a {plain.__qualname__} cannot be prepared in place ({error}); prepare the module that it was made from"
        ) from error
    return instance


def _set_class(instance: Any, kind: type) -> None:
    """Set the class of an object, past a ``__setattr__`` that sets attributes on another one, as wrappers have."""
    _CLASS.__set__(instance, kind)


def restore(instance: T) -> T:
    """Give the instance its plain class back; does nothing to an instance that has it."""
    plain = plain_class(instance)
    if plain is not type(instance):
        _set_class(instance, plain)
    return instance


def plain_class(instance: T) -> type[T]:
    """Return the class that the instance had before `specialise`."""
    return vars(type(instance)).get(PLAIN_CLASS, type(instance))


def innermost_class(instance: T) -> type[T]:
    """Return the class that the instance had before any `specialise`."""
    found = type(instance)
    while PLAIN_CLASS in vars(found):
        found = vars(found)[PLAIN_CLASS]
    return found


def plain_view(model: nn.Module, precision: Precision | None, *, keeps_inner: bool = False) -> nn.Module:
    """Return another object of the plain class that shares all state with ``model``, which is left as it is.

    With a ``precision`` its forward computes in it. ``keeps_inner`` keeps the innermost change, which is compiled code.
    """
    classes = [type(model)]
    while PLAIN_CLASS in vars(classes[-1]):
        classes.append(vars(classes[-1])[PLAIN_CLASS])
    own = [found[_OWN_FORWARD] for found in map(vars, classes) if _OWN_FORWARD in found]
    view = object.__new__(classes[-2] if keeps_inner and len(classes) > 1 else classes[-1])
    if own and not keeps_inner:
        view.__dict__ = {**vars(model), "forward": own[-1]}
    else:
        view.__dict__ = vars(model)
    if precision is None or precision.policy.compute is None:
        return view
    forward = plain_forward(view, precision)
    vars(view).pop("forward", None)
    return specialise(view, {"forward": lambda self, *args, **kwargs: forward(*args, **kwargs)})


def reduce_plainly(instance: Any, protocol: Any) -> Any:
    """Return the reduction of an object as one of its plain class."""
    return _as_plain(instance, lambda: instance.__reduce_ex__(protocol))


def without_class_check(reduced: Any) -> Any:
    """Return a reduction that pickle accepts although its class is not the object's.

    pickle compares the two for ``copyreg.__newobj__`` only; ``copyreg._reconstructor``, of older protocols, does the
    same without. This is for streams between processes: what reads files by a list of allowed names has not this one.
    """
    if _checks_class(reduced) and len(reduced[1]) == 1:
        return (copyreg._reconstructor, (*reduced[1], object, None), *reduced[2:])  # type: ignore[attr-defined]
    return reduced


def _checks_class(reduced: Any) -> bool:
    """Whether pickle raises unless the reduced object's ``__class__`` is the class in the reduction."""
    return isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Pickled:
    """The class that an object has in a pickle stream."""

    kind: type


class _Reduction(tuple[Any, ...]):
    """A reduction; the object's ``__class__`` is ``pickled.kind`` for as long as this tuple is alive.

    pickle reads ``__class__`` while it holds the tuple. At any other time the object has its real class, since
    libraries derive a new class from ``__class__`` and assign it.
    """

    pickled: _Pickled


def _as_plain(instance: Any, act: Callable[[], Any]) -> Any:
    special = type(instance)
    _set_class(instance, vars(special)[PLAIN_CLASS])
    try:
        return act()
    finally:
        _set_class(instance, special)


def plain_forward(model: nn.Module, precision: Precision) -> Callable[..., Any]:
    """Return a function that runs the model's own forward in the precision's dtype.

    A forward that was set on the instance counts as its own.
    """
    own = vars(model).get("forward")
    forward = own if own is not None else type(model).forward.__get__(model)
    output = precision.policy.output
    if precision.policy.compute is None:
        return forward
    autocast = precision.autocast

    def forward_in_precision(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            result = forward(*args, **kwargs)
        return result if output is None else cast_floats(result, output)

    return forward_in_precision


def give_forward(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Let ``forward(*args, **kwargs)`` run when the model is called, after and before the user's own hooks."""
    own = vars(model).get("forward")

    def forward_of_instance(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    functools.update_wrapper(forward_of_instance, getattr(own, "__func__", type(model).forward))
    methods: dict[str, Callable[..., Any]] = {
        "forward": forward_of_instance,
        # What torch.jit.script compiles: a forward whose code it can read.
        "__prepare_scriptable__": lambda self: plain_view(self, None),
    }
    if own is not None:
        methods[_OWN_FORWARD] = own
    specialise(model, methods)
    vars(model).pop("forward", None)
    return model


def take_forward_back(model: nn.Module) -> nn.Module:
    """Undo `give_forward`."""
    own = vars(type(model)).get(_OWN_FORWARD)
    restore(model)
    if own is not None:
        vars(model)["forward"] = own
    return model
