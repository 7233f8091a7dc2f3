"""Classification of losses as means, sums or weighted means, by the last nodes of their autograd graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from accel_nb.runtime.process.user_code import warn_at_user_line

_MEAN, _SUM = 1, 2  # the reduction of a loss, as autograd saves it
_NO_INDEX = 2**64 - 100  # the default of ignore_index, as autograd saves it


class WeightedLoss(NamedTuple):
    """A loss that was divided by a total weight.

    Whether ranks must exchange the weights depends on the shares of all ranks. That is determined once for each
    ``key``, so the other values are computed only when they are needed.
    """

    key: str
    node: Any
    num_samples: int
    divisor: Tensor | None = None
    is_sum: bool = False

    @property
    def total(self) -> Tensor:
        """The total weight, a tensor of one element."""
        return self.node._saved_total_weight if self.divisor is None else self.divisor.detach()

    @property
    def needs_exchange(self) -> bool:
        """Whether the total weight may differ from the number of samples, judged by this rank's share.

        The weight of a mean cross entropy is the number of samples if each sample has one target, and there are neither
        class weights nor ignored targets.
        """
        if self.divisor is not None:
            return self.is_sum
        node = self.node
        return not (
            node._saved_weight is None
            and node._saved_ignore_index == _NO_INDEX
            and _has_one_target_each(node, self.num_samples)
        )

    def drop_gradient_unless(self, has_weight: Tensor) -> None:
        """Make the gradient of the loss zero unless ``has_weight``, which is read when the gradient is computed."""
        self.node.register_prehook(lambda gradients: tuple(value.where(has_weight, 0.0) for value in gradients))


LossReduction = Literal["mean", "sum"] | WeightedLoss
"""How a loss is reduced: a mean or sum over samples, or a division by a total weight."""

_Edge = tuple[Any, int]  # a node of an autograd graph, and the number of one of its outputs

_MAX_SCALES = 4
_MAX_ADDED = 64
_MAX_STEPS = 4
_COMPILED = (
    "the loss is computed by a compiled function, so what it is divided by is not known: in a batch that the ranks "
    "share unevenly it is weighted by samples, as a mean over them. If the code divides it by a total of all ranks "
    "itself, compute it outside of the compiled model, or divide batches evenly (even_batches=True, drop_last=True)"
)


class _Scale(NamedTuple):
    """The divisor of a loss, and the number of additions, between a node of its graph and the end of the graph."""

    constant: float = 1.0
    divided: float = 0.0  # the part of the constant that stems from divisions and not from factors; 0 for none
    divisor: Tensor | None = None
    is_scaled: bool = False
    num_added: int = 0

    @property
    def divisors(self) -> tuple[float, ...]:
        """The possible divisors of the loss, since code may multiply or divide; empty if it is not scaled."""
        if self.divisor is not None:
            return (float(self.divisor.detach()),)
        found = (self.divided, 0.0 if self.num_added else self.constant) if self.is_scaled else ()
        return tuple(value for value in found if value)

    def by(self, number: float, *, is_factor: bool) -> _Scale:
        """Return the scale after a further division or multiplication by a plain number."""
        constant = self.constant * (1 / (number or math.inf) if is_factor else number)
        divided = self.divided if is_factor else (self.divided or 1.0) * number
        return self._replace(constant=constant, divided=divided, is_scaled=True)


class _Totals(NamedTuple):
    """Totals of a sum, which divided by one of them is a mean: numbers of samples, numbers of terms, total weights."""

    divisors: tuple[float, ...]
    num_samples: int
    num_terms: float = 0.0
    weight: float = 0.0

    def plus(self, node: Any, kind: str) -> _Totals:
        """Return the totals of this sum and another one together."""
        num_terms, weight = _totals_of_sum(node) if kind == "sum" else _totals_of_targets(node)
        return self._replace(num_terms=self.num_terms + num_terms, weight=self.weight + weight)

    @property
    def are_divided_by_own(self) -> bool:
        """Whether the sum is divided by one of its own totals."""
        own = (self.num_samples, self.num_terms, self.weight)
        return any(math.isclose(value, total, rel_tol=1e-6) for value in self.divisors for total in own)


class LossClassifier:
    """Classifies losses by their autograd graph. Caches the kinds of node types, since it runs in every backward."""

    def __init__(self, *, warns: bool = False) -> None:
        self._kinds: dict[type, str] = {}
        # Whether to warn of a loss whose graph is compiled: on one rank, and once.
        self._warns = warns

    def classify(self, loss: Tensor, num_samples: int) -> LossReduction:
        """Return how a rank's ``loss`` over ``num_samples`` samples is reduced; ``mean`` if that is not recognized.

        A total of several losses is a sum if each of them is.
        """
        return self._read((loss.grad_fn, loss.output_nr), _Scale(), num_samples)

    def _read(self, edge: _Edge, scale: _Scale, num_samples: int) -> LossReduction:
        node, kind, scale = self._below_scales(edge, scale)
        if kind in ("other", "compiled"):
            return "mean"
        if kind == "add":
            if scale.num_added >= _MAX_ADDED or node._saved_alpha != 1:
                return "mean"
            scale = scale._replace(num_added=scale.num_added + 1)
            terms = [term for term in node.next_functions if term[0] is not None]
            # The latest term first: the other may be a long chain of losses that a loop has added up.
            are_sums = terms and all(self._read(term, scale, num_samples) == "sum" for term in reversed(terms))
            return "sum" if are_sums else "mean"
        if kind == "nll" and node._saved_reduction == _MEAN:
            return WeightedLoss(_nll_key(node, num_samples), node, num_samples)
        if kind == "sum":
            # A sum over samples has the same number of terms for each sample, unlike a sum of a few losses. A sum over
            # a parameter, as in weight regularization, is not a sum over samples either.
            num_terms = math.prod(node._saved_self_sym_sizes)
            is_sum = num_terms % max(num_samples, 1) == 0 and not (scale.num_added and _is_of_weights(node))
        else:
            is_sum = kind in ("nll", "reduced") and node._saved_reduction == _SUM
            num_terms = node._saved_target.numel() if is_sum and scale.is_scaled else num_samples
        if scale.divisor is not None:
            return WeightedLoss(f"{kind} over a tensor", node, num_samples, scale.divisor, is_sum)
        if not is_sum:
            return "mean"
        # A sum that is divided by this rank's own count, and not by a constant of the whole batch, is a mean.
        # A factor of one of several added losses is the weight of that loss, and not a count.
        counts = {scale.divided, 0.0 if scale.num_added else scale.constant} if scale.is_scaled else ()
        is_own_count = any(count and math.isclose(count, own) for count in counts for own in (num_samples, num_terms))
        return "mean" if is_own_count else "sum"

    def _below_scales(self, edge: _Edge, scale: _Scale) -> tuple[Any, str, _Scale]:
        """Return the node below multiplications and divisions, its kind, and the scale including them.

        The kind is ``other`` if the multiplied or divided operand is not determined.
        """
        node = _node_before_outputs(edge)
        kind = self._kind(node)
        for _ in range(_MAX_SCALES):
            if kind not in ("mul", "div"):
                break
            inner = [child for child in node.next_functions if child[0] is not None]
            factor = node._saved_other
            if len(inner) != 1 or factor is None or factor.numel() != 1:
                return node, "other", scale
            if _is_number(factor):
                scale = scale.by(factor.item(), is_factor=kind == "mul")
            elif kind == "div":
                scale = scale._replace(divisor=factor)
            node = _node_before_outputs(inner[0])
            kind = self._kind(node)
        return node, kind, scale

    def is_normalized(self, loss: Tensor, num_samples: int) -> bool:
        """Return whether a loss over ``num_samples`` samples is a sum that the program normalizes over ranks.

        That is a sum that is divided by another total than its own, as by the number of tokens on all ranks, a loss to
        which such a sum is added, and a sum that is not divided, unless it is added to a mean.
        """
        leaves = list(self._leaves((loss.grad_fn, loss.output_nr), _Scale()))
        if self._warns and any(kind == "compiled" for _, kind, _ in leaves):
            self._warns = False
            warn_at_user_line(_COMPILED)
        sums = [(node, kind, scale) for node, kind, scale in leaves if _is_sum(node, kind, num_samples)]
        totals: dict[Any, _Totals] = {}
        for node, kind, scale in sums:
            divisors = scale.divisors
            key = id(scale.divisor) if scale.divisor is not None else divisors
            known = totals.get(key, _Totals(divisors, num_samples))
            totals[key] = known.plus(node, kind)
        divided = [found for found in totals.values() if found.divisors]
        if len(sums) == len(leaves) and not divided:
            return bool(sums)
        return any(not found.are_divided_by_own for found in divided)

    def _leaves(self, edge: _Edge, scale: _Scale) -> Iterator[tuple[Any, str, _Scale]]:
        """Yield the terms of a total of losses, each with its kind and its scale."""
        queue = [(edge, scale)]
        for _ in range(2 * _MAX_ADDED):
            if not queue:
                return
            node, kind, scale = self._below_scales(*queue.pop())
            if kind == "add" and node._saved_alpha == 1:
                added = scale._replace(num_added=scale.num_added + 1)
                queue += [(child, added) for child in node.next_functions if child[0] is not None]
            elif not (kind == "sum" and scale.num_added and _is_of_weights(node)):
                yield node, kind, scale

    def _kind(self, node: Any) -> str:
        kind = self._kinds.get(type(node))
        if kind is None:
            kind = self._kinds[type(node)] = _kind_of(node)
        return kind


def _node_before_outputs(edge: _Edge) -> Any:
    """Return the node of an edge, or the one before it if it is a DDP model's node around all outputs."""
    node, index = edge
    return node.next_functions[index][0] if type(node).__name__.startswith("_DDPSink") else node


def _kind_of(node: Any) -> str:
    name = type(node).__name__
    if name in ("MulBackward0", "DivBackward0"):
        return name[:3].lower()
    if name in ("AddBackward0", "SubBackward0"):
        return "add"
    if name == "SumBackward0":
        return "sum"
    if name == "CompiledFunctionBackward":
        return "compiled"
    if name in ("NllLossBackward0", "NllLoss2DBackward0"):
        return "nll"
    return "reduced" if hasattr(node, "_saved_reduction") and hasattr(node, "_saved_target") else "other"


def _nll_key(node: Any, num_samples: int) -> str:
    """Return the key of a negative log likelihood; losses with equal keys need the same exchange of weights."""
    is_weighted, ignored = node._saved_weight is not None, node._saved_ignore_index
    return f"{type(node).__name__} {is_weighted} {ignored} {_has_one_target_each(node, num_samples)}"


def _has_one_target_each(node: Any, num_samples: int) -> bool:
    return node._saved_target.numel() == max(num_samples, 1)  # an empty share has one filler sample


def _is_sum(node: Any, kind: str, num_samples: int) -> bool:
    """Return whether a term of a loss is a sum over samples or tokens, and not one of a few losses."""
    if kind == "sum":
        num_terms = math.prod(node._saved_self_sym_sizes)
        return num_terms > num_samples or num_terms % max(num_samples, 1) == 0
    return kind in ("nll", "reduced") and node._saved_reduction == _SUM


def _totals_of_sum(node: Any) -> tuple[int, float]:
    """Return the number of terms of a sum, and the total of the mask by which they are multiplied or selected."""
    num_terms = math.prod(node._saved_self_sym_sizes)
    masked = node.next_functions[0][0]
    if type(masked).__name__ == "MaskedFillBackward0":
        return num_terms, float(num_terms - masked._saved_mask.expand(node._saved_self_sym_sizes).sum())
    if type(masked).__name__ == "MulBackward0":
        mask = masked._saved_other if masked._saved_other is not None else masked._saved_self
        return num_terms, float(mask.detach().expand(node._saved_self_sym_sizes).sum())
    return num_terms, float(num_terms)


def _totals_of_targets(node: Any) -> tuple[int, float]:
    """Return the number of a loss's targets, and the total weight of those that are not ignored."""
    target = node._saved_target
    ignored = getattr(node, "_saved_ignore_index", None)
    if ignored is None:
        return target.numel(), float(target.numel())
    kept = target[target != (ignored - 2**64 if ignored >= 2**63 else ignored)]
    weight = node._saved_weight
    return target.numel(), float(kept.numel() if weight is None else weight[kept].sum())


def _is_of_weights(node: Any) -> bool:
    """Return whether a value is computed by a few operations from parameters alone, as a weight penalty is."""
    queue, seen = [node], 0
    for part in queue:
        if type(part).__name__ == "AccumulateGrad":
            continue
        seen += 1
        children = [child for child, _ in part.next_functions if child is not None]
        if seen > _MAX_STEPS or len(children) != 1:
            return False
        queue += children
    return True


def _is_number(factor: Tensor) -> bool:
    """Return whether a saved operand was a plain Python number, which takes no part in type promotion."""
    probe = torch.ones((), dtype=torch.float16 if factor.is_floating_point() else torch.int8, device="cpu")
    return torch.result_type(factor, probe) != factor.dtype
