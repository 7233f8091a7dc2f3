"""Classes of one instance. Calling one, as in ``type(model)(...)``, makes an object of the original class."""

from __future__ import annotations

import functools
from typing import Any

PLAIN_CLASS = "_accel_nb_plain_class"
"""The attribute of such a class that holds the original class."""


def make_instance_class(base: type, plain: type, body: dict[str, Any]) -> Any:
    """Return a subclass of ``base`` with the attributes of ``body`` that has the name and documentation of ``plain``.

    Raises TypeError for a class that cannot be derived from.
    """
    shown = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return _metaclass(type(base))(plain.__name__, (base,), {**shown, PLAIN_CLASS: plain, **body})


@functools.cache
def _metaclass(kind: type) -> Any:
    """Return a metaclass for classes of one instance, derived from their usual one."""
    if "_makes_plain_objects" in vars(kind):
        return kind

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = vars(cls).get(PLAIN_CLASS)
        return kind.__call__(cls, *args, **kwargs) if plain is None else plain(*args, **kwargs)

    return type(kind)(kind.__name__, (kind,), {"__call__": __call__, "_makes_plain_objects": True})
