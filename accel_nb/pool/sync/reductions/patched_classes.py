"""Imported classes to which other modules add methods when they are imported, as fastai's modules do.

A class is sent by its module and name. The receiver also imports the modules whose functions it has.
"""

from __future__ import annotations

import importlib
import operator
import sys
from typing import Any


def reduce_patched_class(kind: type) -> Any:
    """Reduce an imported class that has functions of other modules; return NotImplemented for other classes."""
    modules = sorted({name for base in kind.__mro__ for name in _modules_of_functions(base)})
    if not modules:
        return NotImplemented
    return _import_class, (kind.__module__, kind.__qualname__, modules)


def _modules_of_functions(kind: type) -> set[str]:
    """Return the modules of a class's functions, without its own and those that change no classes."""
    found: set[str] = set()
    for value in list(vars(kind).values()):
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        module = getattr(function, "__globals__", {}).get("__name__")
        if module in (kind.__module__, "__main__", None) or module not in sys.modules:
            continue
        if module.partition(".")[0] not in _WITHOUT_PATCHES:
            found.add(module)
    return found


def _import_class(module: str, name: str, patching: list[str]) -> Any:
    found = operator.attrgetter(name)(importlib.import_module(module))
    for other in patching:
        importlib.import_module(other)
    return found


_WITHOUT_PATCHES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "accel_nb"}
"""Packages whose modules add no methods to classes of others."""
