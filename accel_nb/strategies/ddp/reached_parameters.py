"""Parameters that a loss uses although the model's output was not computed from them.

With ``find_unused_parameters`` DDP marks every parameter outside of the output's autograd graph as unused, and raises
an error when the loss uses it even so: a noise level that only the loss has, or a penalty on weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor
from torch.nn.parallel.distributed import _find_tensors  # pyright: ignore[reportPrivateUsage]

_MAX_OUTPUTS = 4
"""The number of outputs whose graphs are kept; outputs without a backward pass are dropped when newer ones come."""


class ReachedParameters:
    """The graphs of a model's latest outputs since the last backward pass."""

    def __init__(self) -> None:
        self._outputs: deque[list[Any]] = deque(maxlen=_MAX_OUTPUTS)

    def add(self, output: Any) -> None:
        """Record an output of the model, in which tensors are found as DDP finds them."""
        self._outputs.append(_nodes(_find_tensors(output)))

    def uses_unrecorded(self, loss: Tensor, parameters: Iterable[Tensor]) -> bool:
        """Return whether the loss uses one of ``parameters`` that no recorded output uses; clear the outputs."""
        ends = [node for output in self._outputs for node in output]
        self._outputs.clear()
        own = set(map(id, parameters))
        outside = own & _leaves(_nodes([loss]), excluded=set(ends))
        return bool(outside and outside - _leaves(ends))


def _nodes(tensors: Iterable[Tensor]) -> list[Any]:
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def _leaves(nodes: Iterable[Any], excluded: Collection[Any] = ()) -> set[int]:
    """Return the ids of the leaf tensors that nodes of a graph reach without passing the ``excluded`` ones."""
    queue = [node for node in nodes if node not in excluded]
    seen = {*queue, *excluded}
    found: set[int] = set()
    while queue:
        node = queue.pop()
        leaf = getattr(node, "variable", None)  # of a node that accumulates the gradient of a leaf
        if leaf is not None:
            found.add(id(leaf))
        for child in _next_nodes(node):
            if child not in seen:
                seen.add(child)
                queue.append(child)
    return found


def _next_nodes(node: Any) -> list[Any]:
    try:
        return [child for child, _ in node.next_functions if child is not None]
    except RuntimeError:  # in torch 2.9, for a node of a Python function whose graph was freed
        return []
