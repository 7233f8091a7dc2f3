"""Access to gradients that a strategy holds elsewhere than in ``parameter.grad``.

This module imports torch only after a strategy has registered parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

_holders: Any = None
"""By parameter, a weak reference to its holder; created at the first registration."""


class GradientHolder(Protocol):
    """The owner of the gradients of some parameters."""

    def gradient_shard(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this rank's shard of a complete gradient, which `sharded.full_tensor` gathers; None without one."""
        ...

    def write_gradient(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace the full gradient of a parameter; None drops it. Every rank must call."""
        ...


def register_holder(parameters: Iterable[nn.Parameter], holder: GradientHolder) -> None:
    """Register the ``holder`` that `gradient_of` and `set_gradient` call for parameters."""
    global _holders
    if _holders is None:
        from torch.utils.weak import WeakIdKeyDictionary

        _holders = WeakIdKeyDictionary()
    reference = weakref.ref(holder)
    for parameter in parameters:
        _holders[parameter] = reference


def unregister_holder(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `register_holder`."""
    if _holders is not None:
        for parameter in parameters:
            _holders.pop(parameter, None)


def is_held(tensor: Any) -> bool:
    """Return whether the gradient of a tensor is held elsewhere than in its ``grad``."""
    return _holder_of(tensor) is not None


def gradient_of(tensor: Any) -> Any:
    """Return the gradient of a leaf tensor: ``tensor.grad``, or this rank's shard if it is held elsewhere."""
    holder = _holder_of(tensor)
    return tensor.grad if holder is None else holder.gradient_shard(tensor)


def set_gradient(tensor: Any, value: Any) -> None:
    """Set the full gradient of a leaf tensor, or drop it; every rank must call."""
    holder = _holder_of(tensor)
    if holder is None:
        tensor.grad = value
    else:
        holder.write_gradient(tensor, value)


def _holder_of(tensor: Any) -> GradientHolder | None:
    reference = None if _holders is None else _holders.get(tensor)
    return None if reference is None else reference()
