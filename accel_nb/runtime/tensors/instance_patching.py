"""Subclasses created for one instance, which change how an object behaves without replacing the object.

The object keeps its identity, its attributes and the name of its class. A copy has the plain class, and so has the
object in a pickle stream: no reference to accel_nb is written to a file or sent to another process. Calling the
subclass, as in ``type(model)(...)``, creates an object of the plain class.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import types
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from accel_nb.errors import MisuseError
from accel_nb.runtime.subclass_hooks import without_subclass_hooks

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

PLAIN_CLASS = "_accel_nb_plain_class"
"""The attribute of an instance's subclass that contains the plain class."""

_OWN_FORWARD = "_accel_nb_own_forward"
_CLASS: Any = vars(object)["__class__"]


def patch_instance(instance: T, methods: dict[str, Callable[..., Any]], plain: type[T] | None = None) -> T:
    """Override methods of one instance, in place; `unpatch_instance` removes the overrides.

    ``plain`` is the class that `unpatch_instance` restores, and whose name the new class has; by default the current
    class. Raises `MisuseError` if the class cannot be subclassed.
    """
    base = type(instance)
    plain = plain or base
    reduce = methods.get("__reduce_ex__", reduce_as_plain)
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


def make_instance_class(base: type, plain: type, body: dict[str, Any]) -> Any:
    """Return a subclass of ``base`` with the attributes of ``body`` and the name and documentation of ``plain``.

    Raises TypeError if the class cannot be subclassed.
    """
    shown = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    with without_subclass_hooks([base]):
        return _metaclass(type(base))(plain.__name__, (base,), {**shown, PLAIN_CLASS: plain, **body})


@functools.cache
def _metaclass(kind: type) -> Any:
    """Return the metaclass of subclasses for one instance, derived from the usual metaclass ``kind``."""
    if "_makes_plain_objects" in vars(kind):
        return kind

    usual = ABCMeta if kind is type else kind  # so that a class may be derived from the subclass and an abstract class

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = vars(cls).get(PLAIN_CLASS)
        return usual.__call__(cls, *args, **kwargs) if plain is None else plain(*args, **kwargs)

    return type(usual)(usual.__name__, (usual,), {"__call__": __call__, "_makes_plain_objects": True})


def _set_class(instance: Any, kind: type) -> None:
    """Set the class of an object, bypassing a ``__setattr__`` that forwards to a wrapped object."""
    _CLASS.__set__(instance, kind)


def unpatch_instance(instance: T) -> T:
    """Undo the last `patch_instance` of an instance, if there is one, and return the instance."""
    plain, special = plain_class(instance), type(instance)
    if plain is not special:
        _set_class(instance, plain)
        _drop_methods(special)
    return instance


def _drop_methods(special: type) -> None:
    """Remove the methods of a class without instances, so that objects that they reference can be freed.

    A class refers to itself: until the garbage collector runs, it would keep the model whose forward it has replaced.
    """
    for name, value in list(vars(special).items()):
        if isinstance(value, types.FunctionType) or name == _OWN_FORWARD:
            type.__delattr__(special, name)


def plain_class(instance: T) -> type[T]:
    """Return the class that the instance had before the last `patch_instance`."""
    return vars(type(instance)).get(PLAIN_CLASS, type(instance))


def innermost_class(instance: T) -> type[T]:
    """Return the class that the instance had before the first `patch_instance`."""
    return _classes(instance)[-1]


def _classes(instance: T) -> list[type[T]]:
    """Return the class of an instance, its plain class, the plain class of that, and so on to the innermost."""
    classes = [type(instance)]
    while is_of_instance(classes[-1]):
        classes.append(vars(classes[-1])[PLAIN_CLASS])
    return classes


def _own_forwards(classes: Iterable[Mapping[str, Any]]) -> list[Callable[..., Any]]:
    """Return the forwards that `replace_forward` has moved from an instance to the attributes of its classes."""
    return [found[_OWN_FORWARD] for found in classes if _OWN_FORWARD in found]


def plain_view(model: nn.Module, *, keeps_inner: bool = False) -> nn.Module:
    """Return another object that shares all state with ``model``, with its innermost class and its original forward.

    ``keeps_inner`` keeps the subclass that the first `patch_instance` has created, which runs compiled code.
    """
    classes = _classes(model)
    own = _own_forwards(map(vars, classes))
    view = object.__new__(classes[-2] if keeps_inner and len(classes) > 1 else classes[-1])
    view.__dict__ = {**vars(model), "forward": own[-1]} if own and not keeps_inner else vars(model)
    return view


def reduce_as_plain(instance: Any, protocol: Any) -> Any:
    """Return the reduction of an object as an instance of its plain class."""
    return _as_plain(instance, lambda: _reduce(instance, protocol))


def reduce_as_innermost(instance: Any, protocol: Any) -> Any:
    """Return the reduction of an object as an instance of its innermost class, ignoring overrides by subclasses."""
    return _as_plain(instance, lambda: _reduce(instance, protocol), innermost_class(instance))


def _reduce(instance: Any, protocol: Any) -> Any:
    reduced = instance.__reduce_ex__(protocol)
    if isinstance(reduced, tuple) and len(reduced) > 2 and "forward" in vars(instance) and reduced[2] is vars(instance):
        return (*reduced[:2], dict(reduced[2]), *reduced[3:])  # `_as_plain` removes the forward again
    return reduced


def without_class_check(reduced: Any) -> Any:
    """Return a reduction that pickle accepts although it contains another class than the object's.

    pickle compares the two for ``copyreg.__newobj__`` only; ``copyreg._reconstructor``, of older protocols, does the
    same without the check. Use it for streams between processes only: safe readers of files, which accept a list of
    names, reject ``copyreg._reconstructor``.
    """
    if _checks_class(reduced) and len(reduced[1]) == 1:
        return (copyreg._reconstructor, (*reduced[1], object, None), *reduced[2:])  # type: ignore[attr-defined]
    return reduced


def _checks_class(reduced: Any) -> bool:
    """Return whether pickle raises unless the reduced object's ``__class__`` is the class in the reduction."""
    return isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Pickled:
    """The class that an object has in a pickle stream."""

    kind: type


class _Reduction(tuple[Any, ...]):
    """A reduction; the object's ``__class__`` is ``pickled.kind`` for as long as this tuple is alive.

    pickle reads ``__class__`` while it references the tuple. At other times ``__class__`` is the real class, as
    libraries derive a new class from ``__class__`` and assign it.
    """

    pickled: _Pickled


def _as_plain(instance: Any, act: Callable[[], Any], kind: type | None = None) -> Any:
    """Call ``act`` while the instance has its plain class, or the class ``kind``, and its own forward."""
    special = type(instance)
    # A library may have derived a class from the instance's, which has no entry for its plain class.
    patched = next(found for found in map(vars, special.__mro__) if PLAIN_CLASS in found)
    own = _own_forwards([patched] if kind is None else map(vars, _classes(instance)))
    has_own = bool(own) and "forward" not in vars(instance)  # else code has set another one since
    try:
        _set_class(instance, kind or patched[PLAIN_CLASS])
        if has_own:
            vars(instance)["forward"] = own[-1]
        return act()
    finally:
        if has_own:
            vars(instance).pop("forward", None)
        _set_class(instance, special)


def replace_forward(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Replace ``forward`` of one model, in place; calls of the model still run the user's hooks."""
    own = vars(model).get("forward")
    plain, reference = innermost_class(model), weakref.ref(model)

    def forward_of_instance(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_of_instance(type(self)) and reference() is not self:
            # A library has derived a class from the model's and computes with other parameters.
            return plain.forward(self, *args, **kwargs)
        return forward(*args, **kwargs)

    functools.update_wrapper(forward_of_instance, getattr(own, "__func__", type(model).forward))
    methods: dict[str, Callable[..., Any]] = {
        "forward": forward_of_instance,
        # torch.jit.script compiles the object that this returns, whose forward must have source code.
        "__prepare_scriptable__": lambda self: plain_view(self),
    }
    if own is not None:
        methods[_OWN_FORWARD] = own
    patch_instance(model, methods)
    vars(model).pop("forward", None)
    return model


def replaced_forward(kind: type) -> Callable[..., Any] | None:
    """Return the ``forward`` attribute that `replace_forward` has moved from an instance to its class, if any."""
    return vars(kind).get(_OWN_FORWARD)


def forward_of_user(model: nn.Module) -> Callable[..., Any] | None:
    """Return the ``forward`` that code has set on an instance, also if `replace_forward` has moved it; else None."""
    own = vars(model).get("forward")
    for kind in reversed(_classes(model)) if own is None else ():
        own = vars(kind).get(_OWN_FORWARD) if own is None else own
    return own


def is_of_instance(kind: type) -> bool:
    """Return whether a class is one that `patch_instance` has created."""
    return PLAIN_CLASS in vars(kind)


def unbound_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` as a function of the module and its arguments, which does not keep the module alive."""
    own = vars(module).get("forward")
    if own is None and isinstance(inspect.getattr_static(type(module), "forward"), staticmethod):
        own = type(module).forward
    return type(module).forward if own is None else lambda _, *args, **kwargs: own(*args, **kwargs)


def restore_forward(model: nn.Module) -> nn.Module:
    """Undo `replace_forward`."""
    own = vars(type(model)).get(_OWN_FORWARD)
    unpatch_instance(model)
    if own is not None:
        vars(model)["forward"] = own
    return model
