"""Rules for how the results of PyTorch operations depend on the samples of a batch.

`propagate` returns the dependence of a result on the samples, given the dependences of the operation's arguments. An
operation that is not listed counts as mixing the samples. A loss that is a sum or a mean over samples by these rules
can be computed from shares of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

Kind = Literal["sum", "mean", "weighted", "model"]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Dependence of a tensor in which each index along ``dim`` belongs to one sample.

    The size of ``dim`` is ``outer`` x samples x ``inner``: ``inner`` successive indices belong to one sample, and the
    sequence of samples occurs ``outer`` times. Both are 0 if the number of indices depends on the samples' values.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def is_counted(self) -> bool:
        """Whether all samples have the same number of indices."""
        return self.outer > 0


@dataclass(frozen=True, slots=True)
class BatchReduction:
    """Dependence of a value of the whole batch that is linear in its samples.

    Kinds are a ``sum`` over samples, a ``mean`` over samples, a sum divided by another sum (``weighted``), and a value
    that a model has reduced in its forward pass (``model``).
    """

    kind: Kind


@dataclass(frozen=True, slots=True)
class MixedSamples:
    """Dependence of a value that combines the samples of a batch in another way.

    ``reason`` names the operation; ``line`` is the line of the user's code that called it, None if unknown.
    """

    reason: str
    line: int | None = None


SampleDependence = SampleRows | BatchReduction | MixedSamples
"""How a tensor depends on the samples of a batch; None is used for a tensor that does not depend on them."""

_POINTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "alias", "asin", "asinh", "atan", "atan2", "atanh",
        "bernoulli", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max",
        "clamp_min", "clone", "complex", "copy", "copysign", "cos", "cosh", "detach", "digamma", "div", "elu", "eq",
        "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "exponential", "fill", "float_power", "floor",
        "floor_divide", "fmax", "fmin", "fmod", "frac", "ge", "gelu", "gt", "hardshrink", "hardsigmoid", "hardswish",
        "hardtanh", "heaviside", "hypot", "i0", "isfinite", "isinf", "isnan", "le", "leaky_relu", "lerp", "lgamma",
        "lift_fresh", "log", "log10", "log1p", "log2", "log_sigmoid_forward", "logaddexp", "logaddexp2", "logical_and",
        "logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill", "maximum", "minimum", "mish", "mul",
        "nan_to_num", "native_dropout", "ne", "neg", "nextafter", "normal", "polygamma", "positive", "pow",
        "_prelu_kernel", "rand_like", "randint_like", "randn_like", "random", "reciprocal", "relu", "relu6",
        "remainder", "round", "rrelu_with_noise", "rsqrt", "rsub", "sgn", "sigmoid", "sign", "signbit", "silu", "sin",
        "sinc", "sinh", "softplus", "softshrink", "sqrt", "square", "sub", "tan", "tanh", "threshold", "_to_copy",
        "true_divide", "trunc", "uniform", "where", "xlogy", "__and__", "__or__", "__xor__", "__lshift__",
    }
)  # fmt: skip
_SAME_VALUE = frozenset({"_to_copy", "alias", "clone", "copy", "detach", "lift_fresh", "neg", "positive"})
"""Operations that return their argument, its copy or its negative."""
_VIEWS = frozenset(
    {
        "_reshape_alias", "_unsafe_view", "chunk", "diagonal", "expand", "flip", "permute", "repeat", "reshape", "roll",
        "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "tril", "triu", "unbind", "unfold",
        "unsqueeze", "view", "view_as_complex", "view_as_real",
    }
)  # fmt: skip
_REDUCTIONS = frozenset(
    {
        "all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "linalg_vector_norm", "logsumexp",
        "max", "mean", "median", "min", "mode", "nanmedian", "nansum", "norm", "prod", "std", "std_mean", "sum", "var",
        "var_mean",
    }
)  # fmt: skip
_ALONG_DIM = frozenset(
    {
        "_log_softmax", "_softmax", "argsort", "cummax", "cummin", "cumprod", "cumsum", "glu", "kthvalue",
        "log_softmax", "logcumsumexp", "softmax", "sort", "topk",
    }
)  # fmt: skip
_KEEPING_BATCH = frozenset(
    {
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math", "adaptive_max_pool2d",
        "avg_pool1d", "avg_pool2d", "avg_pool3d", "constant_pad_nd", "convolution", "max_pool2d_with_indices",
        "max_pool3d_with_indices", "mkldnn_convolution", "native_group_norm", "reflection_pad1d", "reflection_pad2d",
        "replication_pad1d", "replication_pad2d", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d",
        "upsample_nearest1d", "upsample_nearest2d", "pixel_shuffle", "im2col", "col2im", "grid_sampler_2d",
    }
)  # fmt: skip
"""Operations whose arguments and results have the batch in their first dim."""
_ELEMENT_LOSSES = frozenset(
    {
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "mse_loss", "smooth_l1_loss",
        "soft_margin_loss",
    }
)  # fmt: skip
_ROW_LOSSES = frozenset(
    {"multi_margin_loss", "multilabel_margin_loss_forward", "nll_loss_forward", "nll_loss2d_forward"}
)
_CONSTANT = frozenset({"empty_like", "full_like", "ones_like", "zeros_like", "zero"})
"""Operations whose result does not depend on the values of their argument."""
_NONE, _MEAN, _SUM = 0, 1, 2
"""The values of the argument ``reduction`` of torch's losses in C++."""


@dataclass(frozen=True, slots=True)
class OperationCall:
    """One call of an operation: its name, its arguments by name, and the dependence of each tensor among them."""

    name: str
    arguments: Mapping[str, Any]
    dependences: Mapping[int, SampleDependence]
    """By the id of a tensor."""
    num_samples: int
    batch_numbers: frozenset[float] = frozenset()
    """Python numbers that the cell has computed from the batch, such as a count of its valid targets."""

    def dependence_of(self, tensor: Any) -> SampleDependence | None:
        """Return the dependence of an argument."""
        return self.dependences.get(id(tensor)) if isinstance(tensor, Tensor) else None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, including those in lists."""
        return list(_tensors_in(self.arguments.values()))


def base_name(operation: Any) -> str:
    """Return the name of an operation without its overload and without the underscore of an in-place operation."""
    name = operation.overloadpacket.__name__
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def bind_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operation's arguments by name, with the defaults of those that were left out."""
    schema = operation._schema.arguments
    bound = {item.name: item.default_value for item in schema if item.has_default_value()}
    bound.update({item.name: value for item, value in zip(schema, args, strict=False)})
    bound.update(kwargs)
    return bound


def propagate(call: OperationCall, output: Tensor) -> SampleDependence | None:
    """Return the dependence of one tensor that an operation returned."""
    dependences = {id(tensor): found for tensor in call.tensors if (found := call.dependence_of(tensor)) is not None}
    mixed = next((found for found in dependences.values() if isinstance(found, MixedSamples)), None)
    if mixed is not None or not dependences or call.name in _CONSTANT:
        return mixed
    if call.name in ("eq", "ne") and not isinstance(call.arguments["other"], Tensor):
        is_for_all = output.all() if call.name == "ne" else not output.any()
        if is_for_all:
            return None  # no target equals the ignored index
    found = _result(call, list(dependences.values()), output)
    return MixedSamples(f"`{call.name}` of {_describe(dependences.values())}") if found is None else found


def find_sample_rows(tensor: Tensor, num_samples: int) -> SampleRows | None:
    """Return the dim of the samples in a tensor of a batch, by the tensor's sizes; None if no dim fits."""
    for dim, size in enumerate(tensor.shape):
        if size == num_samples:
            return SampleRows(dim)
    if tensor.dim() and tensor.shape[0] and tensor.shape[0] % num_samples == 0:
        return SampleRows(0, inner=tensor.shape[0] // num_samples)
    return None


def _describe(dependences: Iterable[SampleDependence]) -> str:
    kinds = {item.kind for item in dependences if isinstance(item, BatchReduction)}
    if "mean" in kinds or "weighted" in kinds or "model" in kinds:
        return "a mean over the batch"
    return "a sum over the batch" if kinds else "samples with each other"


def _tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _result(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    """Return the dependence of a result; None where the operation mixes samples."""
    name, arguments = call.name, call.arguments
    if name in _POINTWISE:
        return _pointwise(call, dependences, output)
    first = next(iter(call.tensors))
    own = call.dependence_of(first)
    if isinstance(own, BatchReduction):
        linear = name in ("sum", "mean") or name in _VIEWS
        return own if linear and len(dependences) == 1 else _joined(call, dependences, output)
    if name in _VIEWS and isinstance(own, SampleRows) and len(dependences) == 1:
        return _viewed(name, arguments, own, first, output)
    if name in _REDUCTIONS and isinstance(own, SampleRows) and len(dependences) == 1:
        return _reduced(name, arguments, own, first)
    if name in _ALONG_DIM and isinstance(own, SampleRows) and len(dependences) == 1:
        return None if arguments.get("dim", -1) % max(first.dim(), 1) == own.dim else own
    if name in _KEEPING_BATCH:
        if "convolution" in name and call.dependence_of(arguments["weight"]) is not None:
            return None  # the samples of the weight are channels of the result
        return (
            SampleRows(0)
            if all(item == SampleRows(0) for item in dependences) and isinstance(own, SampleRows)
            else None
        )
    if name in _ELEMENT_LOSSES or name in _ROW_LOSSES:
        return _loss(call, dependences, output)
    rule = _RULES.get(name)
    return None if rule is None else rule(call, dependences, output)


def _pointwise(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    numbers = [value for value in call.arguments.values() if isinstance(value, int | float)]
    if any(float(value) in call.batch_numbers for value in numbers if not isinstance(value, bool)):
        return None
    if any(isinstance(item, BatchReduction) for item in dependences):
        return _linear(call, dependences) if all(isinstance(item, BatchReduction) for item in dependences) else None
    return _aligned(call, output.dim())


def _aligned(call: OperationCall, num_dims: int, among: Iterable[Any] | None = None) -> SampleRows | None:
    """Return the dim of the samples after broadcasting; None if it differs among the arguments."""
    found: set[SampleRows] = set()
    for tensor in call.tensors if among is None else _tensors_in(among):
        rows = call.dependence_of(tensor)
        if isinstance(rows, SampleRows):
            found.add(replace(rows, dim=rows.dim + num_dims - tensor.dim()))
    return found.pop() if len(found) == 1 else None


def _linear(call: OperationCall, dependences: list[SampleDependence]) -> BatchReduction | None:
    """Return the dependence of a result of arithmetic on reduced values; None if it is not linear in the samples."""
    name, arguments = call.name, call.arguments
    kinds: set[Kind] = {item.kind for item in dependences if isinstance(item, BatchReduction)}
    own, other = call.dependence_of(arguments.get("self")), arguments.get("other")
    depends = call.dependence_of(other) is not None
    if name in _SAME_VALUE and len(kinds) == 1:
        return BatchReduction(kinds.pop())
    if name in ("add", "sub", "rsub") and len(kinds) == 1:
        kind = kinds.pop()
        constants = [item for item in call.tensors if call.dependence_of(item) is None]
        is_added = kind == "mean" or not any(item.requires_grad for item in constants)
        return BatchReduction(kind) if is_added and (kind in ("sum", "mean") or len(dependences) == 1) else None
    if name == "mul" and len(dependences) == 1 and not (own is not None and depends):
        return _scaled(call, dependences[0], 1 / other if isinstance(other, float | int) and other else None)
    if name in ("div", "true_divide") and own is not None and arguments.get("rounding_mode") is None:
        if not depends:
            is_number = isinstance(other, float | int) or (isinstance(other, Tensor) and not other.dim())
            return _scaled(call, own, float(cast("float", other)) if is_number else None)
        total = call.dependence_of(other)
        both = (
            {own.kind, total.kind} if isinstance(own, BatchReduction) and isinstance(total, BatchReduction) else set()
        )
        return BatchReduction("weighted") if both in ({"sum"}, {"mean"}) and own is not total else None
    return None


def _scaled(call: OperationCall, own: SampleDependence, divisor: float | None) -> BatchReduction | None:
    """Return the dependence of a reduced value divided by a number: a sum divided by the sample count is a mean."""
    if not isinstance(own, BatchReduction):
        return None
    is_count = own.kind == "sum" and divisor and math.isclose(divisor, round(divisor))
    return BatchReduction("mean") if is_count and not round(divisor or 0) % call.num_samples else own


def _viewed(
    name: str, arguments: Mapping[str, Any], rows: SampleRows, source: Tensor, output: Tensor
) -> SampleRows | None:
    dim, num_dims = rows.dim, source.dim()
    if name in ("view", "reshape", "_unsafe_view", "_reshape_alias"):
        return _reshaped(rows, source.shape, output.shape)
    if name == "t":
        return replace(rows, dim=1 - dim) if num_dims == 2 else rows
    if name == "transpose":
        first, second = arguments["dim0"] % num_dims, arguments["dim1"] % num_dims
        return replace(rows, dim={first: second, second: first}.get(dim, dim))
    if name == "permute":
        return replace(rows, dim=[item % num_dims for item in arguments["dims"]].index(dim))
    if name == "unsqueeze":
        return replace(rows, dim=dim + (arguments["dim"] % (num_dims + 1) <= dim))
    if name == "squeeze":
        chosen = arguments.get("dim", list(range(num_dims)))
        chosen = {item % num_dims for item in ([chosen] if isinstance(chosen, int) else chosen)}
        squeezed = {item for item in chosen if source.shape[item] == 1}
        return None if dim in squeezed else replace(rows, dim=dim - sum(item < dim for item in squeezed))
    if name in ("expand", "repeat"):
        moved = replace(rows, dim=dim + output.dim() - num_dims)
        times = output.shape[moved.dim] // source.shape[dim]
        return moved if times == 1 else replace(moved, outer=moved.outer * times)
    if name in ("view_as_real", "view_as_complex"):
        return rows
    if name in ("flip", "roll"):
        chosen = arguments["dims"] or [dim]
        return None if dim in {item % num_dims for item in chosen} else rows
    if name in ("tril", "triu", "diagonal"):
        return rows if name != "diagonal" and dim < num_dims - 2 else None
    along = arguments.get("dim", arguments.get("dimension", 0)) % num_dims
    if name == "slice" and along == dim:
        return rows if output.shape == source.shape else None
    if along == dim:
        return None
    return replace(rows, dim=dim - (along < dim)) if name in ("select", "unbind") else rows


def _reshaped(rows: SampleRows, before: Sequence[int], after: Sequence[int]) -> SampleRows | None:
    """Return the dim of the samples after a reshape, which may keep it, merge it with its neighbors, or split it."""
    size, leading, trailing = before[rows.dim], math.prod(before[: rows.dim]), math.prod(before[rows.dim + 1 :])
    if not size * leading * trailing:
        return None
    at = 1
    for dim, length in enumerate(after):
        rest = math.prod(after[dim + 1 :])
        if (at, length, rest) == (leading, size, trailing):
            return replace(rows, dim=dim)
        outer, inner = leading // at, trailing // rest
        if (outer * at, inner * rest, outer * size * inner) == (leading, trailing, length):
            return SampleRows(dim, rows.outer * outer, rows.inner * inner)
        outer, inner = at // leading, rest // trailing
        is_split = (outer * leading, inner * trailing, outer * length * inner) == (at, rest, size)
        if is_split and rows.is_counted and length > 1 and not (rows.outer % outer or rows.inner % inner):
            return SampleRows(dim, rows.outer // outer, rows.inner // inner)
        at *= length
    return None


def _reduced(name: str, arguments: Mapping[str, Any], rows: SampleRows, source: Tensor) -> SampleDependence | None:
    chosen = arguments.get("dim")
    dims = [chosen] if isinstance(chosen, int) else list(chosen or range(source.dim()))
    dims = {item % source.dim() for item in dims}
    if rows.dim not in dims:
        return rows if arguments.get("keepdim") else replace(rows, dim=rows.dim - sum(item < rows.dim for item in dims))
    if name in ("sum", "nansum"):
        return BatchReduction("sum") if name == "sum" else None
    return BatchReduction("mean") if name == "mean" and rows.is_counted else None


def _loss(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    """Return the dependence of one of torch's losses; None if its class weights come from the batch."""
    arguments = call.arguments
    own, target, reduction = arguments["self"], arguments["target"], arguments["reduction"]
    if any(isinstance(item, BatchReduction) for item in dependences) or isinstance(
        call.dependence_of(arguments.get("weight")), SampleRows
    ):
        return None
    if call.name in _ELEMENT_LOSSES:
        rows = _aligned(call, max(own.dim(), target.dim()), [own, target])
    else:
        both = {item for item in (call.dependence_of(own), call.dependence_of(target)) if item is not None}
        # Without a batch dim the classes are the last dim, else the second one.
        rows = both.pop() if len(both) == 1 else None
        if isinstance(rows, SampleRows) and rows.dim == 1 and own.dim() > 1:
            return None
    if not isinstance(rows, SampleRows):
        return None
    if reduction == _NONE:
        return rows
    if reduction == _SUM:
        return BatchReduction("sum")
    if call.name.startswith("nll_loss") and _is_weighted(arguments):
        return BatchReduction("weighted")
    return BatchReduction("mean") if rows.is_counted else None


def _is_weighted(arguments: Mapping[str, Any]) -> bool:
    """Return whether a mean over targets has class weights or ignored targets."""
    has_ignored = bool((arguments["target"] == arguments["ignore_index"]).any())
    return arguments["weight"] is not None or has_ignored


def _joined(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    """Return the dependence of concatenated or stacked tensors."""
    if call.name not in ("cat", "stack"):
        return None
    tensors = list(call.arguments["tensors"])
    if all(isinstance(item, BatchReduction) for item in dependences):
        kinds = set(dependences)
        return kinds.pop() if len(kinds) == 1 and len(dependences) == len({id(item) for item in tensors}) else None
    rows = {item for item in dependences if isinstance(item, SampleRows)}
    if len(rows) != len(set(dependences)) or len({item.dim for item in rows}) != 1:
        return None
    along = call.arguments.get("dim", 0)
    dim = next(iter(rows)).dim
    if call.name == "stack":
        own = rows.pop()
        return None if rows else replace(own, dim=own.dim + (along % output.dim() <= own.dim))
    if along % output.dim() != dim:
        own = rows.pop()
        return None if rows else own
    parts = [call.dependence_of(item) for item in tensors]
    if len({item.inner for item in rows}) != 1 or any(not isinstance(item, SampleRows) for item in parts):
        return None
    return replace(next(iter(rows)), outer=sum(item.outer for item in parts if isinstance(item, SampleRows)))


def _product(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    """Return the dependence of a matrix product: samples are in one factor, or the product sums over them in both."""
    factors = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "mv": ("self", "vec")}
    factors["dot"] = ("self", "tensor")
    first_name, second_name = factors.get(call.name, ("self", "mat2"))
    first, second = call.arguments[first_name], call.arguments[second_name]
    left, right = call.dependence_of(first), call.dependence_of(second)
    if any(isinstance(item, BatchReduction) for item in dependences):
        return None
    if isinstance(left, SampleRows) and isinstance(right, SampleRows):
        if call.name in ("bmm", "baddbmm") and left == right and left.dim == 0:
            found: SampleDependence | None = left
        elif call.name == "dot" or (call.name in ("mm", "addmm") and (left.dim, right.dim) == (1, 0)):
            found = BatchReduction("sum") if replace(left, dim=0) == replace(right, dim=0) else None
        else:
            found = None
    elif isinstance(left, SampleRows):
        found = left if left.dim < first.dim() - 1 else None
    elif isinstance(right, SampleRows):
        is_kept = right.dim == second.dim() - 1 and second.dim() > 1
        found = right if is_kept or (second.dim() == 3 and right.dim == 0) else None
    else:
        found = None
    added = call.dependence_of(call.arguments.get("self")) if call.name in ("addmm", "baddbmm") else None
    if added is None or not isinstance(found, SampleRows):
        return found if added is None else None
    moved = isinstance(added, SampleRows) and replace(
        added, dim=added.dim + output.dim() - call.arguments["self"].dim()
    )
    return found if moved == found else None


def _embedded(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    return (
        call.dependence_of(call.arguments["indices"]) if call.dependence_of(call.arguments["weight"]) is None else None
    )


def _distances(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    first, second = call.arguments["x1"], call.arguments["x2"]
    left, right = call.dependence_of(first), call.dependence_of(second)
    if isinstance(left, SampleRows) and right is None:
        return left if left.dim < first.dim() - 1 else None
    if isinstance(right, SampleRows) and left is None:
        return replace(right, dim=right.dim + 1) if right.dim == second.dim() - 2 else None
    return left if left == right and isinstance(left, SampleRows) and left.dim < first.dim() - 2 else None


def _gathered(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    """Return the dependence of `gather`, `scatter` and `scatter_add`; None where they mix samples."""
    along = call.arguments["dim"]
    rows = {item for item in dependences if isinstance(item, SampleRows)}
    own = rows.pop() if len(rows) == 1 and len(rows) == len(set(dependences)) else None
    if own is None or call.dependence_of(call.arguments["index"]) not in (None, own):
        return None
    return None if along % max(output.dim(), 1) == own.dim else own


def _selected(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    """Return the dependence of `index_select`."""
    source, index, along = call.arguments["self"], call.arguments["index"], call.arguments["dim"]
    own, chosen = call.dependence_of(source), call.dependence_of(index)
    along %= max(source.dim(), 1)
    if isinstance(own, SampleRows) and chosen is None:
        return None if along == own.dim else own
    return SampleRows(along, chosen.outer, chosen.inner) if own is None and isinstance(chosen, SampleRows) else None


def _indexed(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    """Return the dependence of ``values[indices]``."""
    source, indices = call.arguments["self"], list(call.arguments["indices"])
    own = call.dependence_of(source)
    used = [(at, item) for at, item in enumerate(indices) if item is not None]
    at, first = used[0]
    chosen = call.dependence_of(first)
    if len(used) == 1 and first.dtype in (torch.bool, torch.uint8):
        covers = isinstance(own, SampleRows) and at <= own.dim < at + first.dim()
        matches = isinstance(own, SampleRows) and (chosen is None or chosen == replace(own, dim=own.dim - at))
        return SampleRows(at, 0, 0) if covers and matches and isinstance(chosen, SampleRows) else None
    if len(used) == 1 and own is None and isinstance(chosen, SampleRows):
        return replace(chosen, dim=chosen.dim + at)
    if len(used) == 1 and isinstance(own, SampleRows) and chosen is None and at != own.dim and first.dim() == 1:
        return own
    if not isinstance(own, SampleRows) or len(used) != len(indices) or chosen is not None:
        return None
    selects_all = own.dim == at == 0 and _selects_all_rows(first, source)
    return own if selects_all and all(call.dependence_of(item) in (None, own) for _, item in used) else None


def _selects_all_rows(index: Tensor, source: Tensor) -> bool:
    """Return whether an index selects every row of a tensor, in order."""
    size = source.shape[0]
    return index.dim() == 1 and index.numel() == size and bool((index == torch.arange(size, device=index.device)).all())


def _masked(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    rows = {item for item in dependences if isinstance(item, SampleRows)}
    return SampleRows(0, 0, 0) if len(rows) == 1 == len(set(dependences)) else None


def _normalized(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    source = call.arguments["input"]
    own = call.dependence_of(source)
    is_inside = isinstance(own, SampleRows) and own.dim < source.dim() - len(call.arguments["normalized_shape"])
    return own if is_inside and len(dependences) == 1 else None


def _batch_normalized(
    call: OperationCall, dependences: list[SampleDependence], output: Tensor
) -> SampleDependence | None:
    is_plain = not call.arguments.get("training", False) and dependences == [SampleRows(0)]
    return SampleRows(0) if is_plain else None


def _index_put(call: OperationCall, dependences: list[SampleDependence], output: Tensor) -> SampleDependence | None:
    """Return the dependence of ``values[mask] = constant``."""
    indices, own = call.arguments["indices"], call.dependence_of(call.arguments["self"])
    if len(indices) != 1 or call.dependence_of(call.arguments["values"]) is not None or not isinstance(own, SampleRows):
        return None
    is_mask = indices[0].dtype is torch.bool and own.dim < indices[0].dim()
    return own if is_mask and call.dependence_of(indices[0]) in (None, own) else None


_RULES = {
    "_cdist_forward": _distances,
    "_native_batch_norm_legit": _batch_normalized,
    "_native_batch_norm_legit_no_training": lambda call, dependences, output: (
        SampleRows(0) if dependences == [SampleRows(0)] else None
    ),
    "addmm": _product,
    "baddbmm": _product,
    "bmm": _product,
    "cat": _joined,
    "dot": _product,
    "embedding": _embedded,
    "gather": _gathered,
    "index": _indexed,
    "index_put": _index_put,
    "index_select": _selected,
    "masked_select": _masked,
    "mm": _product,
    "mv": _product,
    "native_batch_norm": _batch_normalized,
    "native_layer_norm": _normalized,
    "scatter": _gathered,
    "scatter_add": _gathered,
    "stack": _joined,
}
