"""Whether a loss compares the samples of a batch with each other, as contrastive losses do: read from autograd's graph.

Of a batch that is divided each worker compares only its own share: no average of gradients makes that equal.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_PRODUCTS = frozenset({"MmBackward0", "BmmBackward0", "CdistBackward0"})
_SAME = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ToCopyBackward0"})
_MAX_NODES = 300  # the product of all with all lies near the loss, behind a softmax or a margin


def num_compared(loss: Tensor, num_samples: int) -> int | None:
    """Return how many rows a product of all samples with all has behind ``loss``; None if there is none.

    It is square, of ``num_samples`` rows or a multiple (several views of each sample), and of no parameter.
    """
    if num_samples < 2:
        return None
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    for node in waiting:
        if node is None or node in seen or len(seen) >= _MAX_NODES:
            continue
        seen.add(node)
        rows = _num_rows(node)
        if rows is not None and rows % num_samples == 0 and not any(map(_is_weight, node.next_functions)):
            return rows
        waiting += [child for child, _ in node.next_functions]
    return None


def _num_rows(node: Any) -> int | None:
    """Return the rows of a square product of two matrices, or of the distances between two lists of points.

    From the shape of what the operation gave: to look at what it has saved would compute checkpointed blocks again.
    """
    if type(node).__name__ not in _PRODUCTS or not hasattr(node, "_input_metadata"):
        return None
    *others, rows, columns = node._input_metadata[0].shape
    return rows if rows == columns and all(size == 1 for size in others) else None


def _is_weight(edge: tuple[Any, int]) -> bool:
    """Whether an operand is a parameter, as it is, transposed or cast; one without a gradient is no sample either."""
    node = edge[0]
    while node is not None and type(node).__name__ in _SAME:
        node = node.next_functions[0][0]
    return node is None or type(node).__name__ == "AccumulateGrad"
