"""Whether a tensor is a leaf of autograd's graph, also where torch raises an error on the question."""

from __future__ import annotations

from typing import Any


def is_leaf(tensor: Any) -> bool:
    """Return whether a tensor is the result of no operation with a gradient.

    A view that code made under ``no_grad``, and whose base it has then changed with gradients, has no graph that torch
    could show: reading ``is_leaf`` or ``grad_fn`` raises an error. Such a view is no leaf.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def grad_fn_of(tensor: Any) -> Any:
    """Return the ``grad_fn`` of a tensor; None for a leaf, and for a view of which torch cannot show any."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None
