"""Objects in a pickle stream that pickle copies wrongly or not at all: exceptions, inverse transforms, and others."""

from __future__ import annotations

import functools
import types
from typing import Any


@functools.cache
def inverse_transform_type(torch: Any) -> type:
    """Return the class of inverses of `torch.distributions` transforms, whose copies by pickle have no transform."""
    return type(torch.distributions.ExpTransform().inv)


def reduce_inverse(inverse: Any) -> Any:
    """Reduce the inverse of a transform: as that of the transform's copy."""
    return _invert, (inverse.inv,)


def _invert(transform: Any) -> Any:
    return transform.inv


_WITH_FIELDS = (OSError, ImportError, UnicodeError, SyntaxError, StopIteration, SystemExit, AttributeError, NameError)
"""Exceptions whose built-in ``__init__`` stores arguments outside of ``args``."""


def is_rebuilt_by_init(kind: type[BaseException]) -> bool:
    """Return whether pickle calls an exception's own ``__init__`` with ``args``, which may be other arguments."""
    return (
        isinstance(kind.__init__, types.FunctionType)
        and kind.__reduce__ is BaseException.__reduce__
        and kind.__reduce_ex__ is BaseException.__reduce_ex__
        and not issubclass(kind, _WITH_FIELDS)
    )


def probes_attributes(kind: type) -> bool:
    """Return whether pickle, looking for ``__setstate__``, calls a ``__getattr__`` that may need the state."""
    return hasattr(kind, "__getattr__") and not hasattr(kind, "__setstate__")


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
