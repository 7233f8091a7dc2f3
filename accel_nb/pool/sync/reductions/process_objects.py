"""Objects of which each process has its own: IPython's shell, the standard streams, and the generators of modules.

Functions of cells refer to them, as ``get_ipython()`` in a ``!`` line does, and ``print(..., file=sys.stdout)``. After
``from random import randint`` the name is a method of the generator that ``random.seed`` sets. A copy of one would be
of no use: the receiver puts its own in place.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from accel_nb.pool.sync.reductions.widgets import is_widget

_ATTRIBUTES = (
    ("sys", "stdout"),
    ("sys", "stderr"),
    ("random", "_inst"),
    ("numpy.random.mtrand", "_rand"),
    ("torch", "default_generator"),
)
"""Modules, and the attributes that are such objects."""


def is_of_process(value: Any) -> bool:
    """Return whether the value is the shell, a stream, a module's generator or a widget, or a method of one."""
    if isinstance(value, types.MethodType):
        return is_of_process(value.__self__)
    return is_widget(value) or any(value is found for _, _, found in _module_attributes()) or _is_shell(value)


def has_type_of_process(value: Any) -> bool:
    """Return whether one of the objects of this process has the type of the value."""
    return any(type(value) is type(found) for _, _, found in _module_attributes())


def reduce_of_process(value: Any) -> tuple[Any, ...]:
    """Reduce an object of this process to that of the receiver."""
    if isinstance(value, types.MethodType):
        return getattr, (value.__self__, value.__name__)
    for module, attribute, found in _module_attributes():
        if value is found:
            return getattr, (module, attribute)
    from IPython.core.getipython import get_ipython

    return get_ipython, ()


def _module_attributes() -> Iterator[tuple[types.ModuleType, str, Any]]:
    """Yield the modules that are imported, the names of the attributes, and the objects.

    The generators of ``random`` and NumPy have private names; without one its methods are sent with a copy.
    """
    for name, attribute in _ATTRIBUTES:
        module = sys.modules.get(name)
        if module is not None and (found := getattr(module, attribute, None)) is not None:
            yield module, attribute, found


def _is_shell(value: Any) -> bool:
    shell = sys.modules.get("IPython.core.interactiveshell")
    return shell is not None and isinstance(value, shell.InteractiveShell)
