"""Detection of losses that compare the samples of a batch with each other, as contrastive losses do.

They are recognized by their autograd graph. If the batch is divided, each worker compares only the samples of its
share with each other, and averaging gradients does not give the result of one device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_PRODUCTS = frozenset({"MmBackward0", "BmmBackward0", "CdistBackward0"})
_TRANSPOSES_AND_CASTS = frozenset(
    {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ToCopyBackward0"}
)
_MAX_NODES = 300  # the matrix of pairwise products is near the loss, before a softmax or a margin


def num_compared_rows(loss: Tensor, num_samples: int) -> int | None:
    """Return the number of rows of a matrix of pairwise products in the graph of ``loss``; None if there is none.

    The matrix is square, has ``num_samples`` rows or a multiple (several views of each sample), and no factor of it is
    a parameter.
    """
    if num_samples < 2:
        return None
    queue: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    for node in queue:
        if node is None or node in seen or len(seen) >= _MAX_NODES:
            continue
        seen.add(node)
        rows = _num_rows(node)
        if rows is not None and rows % num_samples == 0 and not any(map(_is_weight, node.next_functions)):
            return rows
        queue += [child for child, _ in node.next_functions]
    return None


def _num_rows(node: Any) -> int | None:
    """Return the rows of a square product of two matrices, or of the distances between two lists of points.

    Read from the shape of the result: reading saved tensors would recompute checkpointed blocks.
    """
    if type(node).__name__ not in _PRODUCTS or not hasattr(node, "_input_metadata"):
        return None
    *others, rows, columns = node._input_metadata[0].shape
    return rows if rows == columns and all(size == 1 for size in others) else None


def _is_weight(edge: tuple[Any, int]) -> bool:
    """Return whether an operand is a parameter, possibly transposed or cast, or has no gradient."""
    node = edge[0]
    while node is not None and type(node).__name__ in _TRANSPOSES_AND_CASTS:
        node = node.next_functions[0][0]
    return node is None or type(node).__name__ == "AccumulateGrad"
