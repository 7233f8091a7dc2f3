"""Objects of which each process has its own: IPython's shell and the standard streams.

Functions of cells refer to them, as ``get_ipython()`` in a ``!`` line does, and ``print(..., file=sys.stdout)``. A copy
of one would be of no use: the receiver puts its own in place.
"""

from __future__ import annotations

import sys
import types
from typing import Any

_STREAMS = ("stdout", "stderr")


def is_of_process(value: Any) -> bool:
    """Return whether the value is the shell or a standard stream of this process, or a method of one."""
    if isinstance(value, types.MethodType):
        return is_of_process(value.__self__)
    return any(value is getattr(sys, name) for name in _STREAMS) or _is_shell(value)


def reduce_of_process(value: Any) -> tuple[Any, ...]:
    """Reduce an object of this process to that of the receiver."""
    if isinstance(value, types.MethodType):
        return getattr, (value.__self__, value.__name__)
    for name in _STREAMS:
        if value is getattr(sys, name):
            return getattr, (sys, name)
    from IPython.core.getipython import get_ipython

    return get_ipython, ()


def _is_shell(value: Any) -> bool:
    shell = sys.modules.get("IPython.core.interactiveshell")
    return shell is not None and isinstance(value, shell.InteractiveShell)
