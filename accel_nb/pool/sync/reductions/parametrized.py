"""Modules with parametrizations, such as ``spectral_norm`` and ``weight_norm``, between kernel and workers.

torch gives each such module a class of its own, whose properties compute the weights, and refuses to pickle it. The
receiver makes the class again from the module's own class.
"""

from __future__ import annotations

import sys
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import is_module


def is_parametrized(value: Any) -> bool:
    """Return whether a value is a module whose class torch has made for its parametrizations."""
    if not is_module(value):
        return False
    parametrize = sys.modules["torch"].nn.utils.parametrize
    if not parametrize.is_parametrized(value):
        return False
    from accel_nb.runtime.tensors.instance_patching import innermost_class

    return innermost_class(value).__module__ == parametrize.__name__


def reduce_parametrized(module: Any) -> Any:
    """Reduce a module to its own class, the names of its parametrized tensors, and its attributes."""
    from accel_nb.runtime.tensors.instance_patching import innermost_class, plain_view

    (kind,) = innermost_class(module).__bases__
    return _make, (kind, tuple(module.parametrizations)), vars(plain_view(module)), None, None, _set_attributes


def _make(kind: Any, names: tuple[str, ...]) -> Any:
    """Return a module without attributes of a class with parametrizations of tensors."""
    import torch
    from torch.nn.utils import parametrize

    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name in names:
        torch.nn.Module.register_parameter(module, name, torch.nn.Parameter(torch.empty(0, device="cpu")))
        parametrize.register_parametrization(module, name, torch.nn.Identity(), unsafe=True)
    vars(module).clear()
    return module


def _set_attributes(module: Any, attributes: dict[str, Any]) -> None:
    vars(module).update(attributes)
