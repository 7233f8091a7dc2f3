"""Search for the dims of the samples in a model's inputs and outputs, checked on a few rows of the first call."""

from __future__ import annotations

import contextlib
import functools
import io
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from accel_nb.accelerator.model_division.argument_changes import (
    CHANGES_ARGUMENTS,
    ArgumentChanges,
    copied_arguments,
)
from accel_nb.accelerator.model_division.backward_code import BackwardCode, TrainsInForward
from accel_nb.accelerator.model_division.module_state import ModuleSnapshot
from accel_nb.accelerator.model_division.near_zero_values import randomize_near_zero
from accel_nb.accelerator.model_division.random_reads import RandomReads
from accel_nb.accelerator.model_division.row_random import ComparedShapes, Draw, DrawnShapes, RowRandom
from accel_nb.accelerator.model_division.tensor_writes import TensorWrites
from accel_nb.accelerator.model_division.value_reads import ANY_VALUE, observed_reads, values_to_compare
from accel_nb.accelerator.training.loss_classification import LossClassifier, WeightedLoss
from accel_nb.errors import AccelNbError
from accel_nb.runtime import rng
from accel_nb.runtime.tensors.nested import find_leaves, find_tensors, map_tensors

NUM_CHECKED = 5
"""Number of rows that a check computes, once together and once in two parts; the second part has one row more."""

_MIN_CHECKED = NUM_CHECKED - 1

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_CODE = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type, nn.Module
)  # fmt: skip
"""Types of callable arguments that store no results; a check would change the results that other callables store."""
_TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-4, torch.complex64: 1e-4}
_HALF_TOLERANCE = 3e-2


Reduction = Literal["mean", "sum", "weighted"]
"""How a value for all rows is computed from the values for parts of them.

``weighted``: by the total weight of a torch loss.
"""


@dataclass(frozen=True)
class RowLayout:
    """The dim of the rows in each tensor of a model's arguments and of its result; None: the tensor has no rows."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | Reduction | None, ...]
    has_draws: bool
    """Whether the forward pass draws random numbers."""
    draws: tuple[Draw, ...] = ()
    """The dim of the rows in each draw."""
    random_problem: str | None = None
    """Why random numbers cannot be assigned to single rows; None if they can."""
    reads: tuple[Any, ...] = ()
    """Each value that the model's code reads from tensors, as by ``item()``; `ANY_VALUE`: it does not affect results.

    With another value the model must be checked again.
    """

    def num_rows(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the number of rows of the arguments; None if it differs among the tensors."""
        sizes = {tensor.shape[dim] for tensor, dim in zip(tensors, self.inputs, strict=True) if dim is not None}
        return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True)
class DivisionRefusal:
    """The reason why a model's calls are not divided."""

    reason: str
    is_final: bool = True
    """Whether the reason holds for other batches too."""


TOO_FEW_ROWS = DivisionRefusal("a batch has too few rows", is_final=False)
TRAINS_IN_FORWARD = "its code runs a backward pass or steps an optimizer"
OWN_GRADIENTS = "its code computes or reads gradients of its own"


def is_divisible(tensor: Tensor) -> bool:
    """Return whether the rows of a tensor can be selected and compared: it is dense and of no other class."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized


def part_problem(error: BaseException) -> str:
    """Return the reason for not dividing a model whose code raised ``error`` for some rows of the batch."""
    return f"it cannot compute a part of the batch ({type(error).__name__}: {str(error)[:80]})"


def signature_of(nested: Any) -> Any:
    """Return a hashable description of the structure of arguments or of a result.

    A signature contains neither the sizes of tensors nor the values of integers and floats.
    """
    if isinstance(nested, Tensor):
        return nested.dim(), nested.dtype, nested.layout
    if isinstance(nested, int | float) and not isinstance(nested, bool):
        return type(nested)
    if isinstance(nested, _PLAIN):
        return nested
    if isinstance(nested, Mapping):
        return type(nested), tuple((key, signature_of(value)) for key, value in nested.items())
    if isinstance(nested, list | tuple):
        return type(nested), tuple(signature_of(value) for value in nested)
    return type(nested)


def find_layout(
    model: nn.Module,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    batch_size: int | None,
    tolerance: float,
    device: str,
    shards_params: bool = False,
    is_compiled: bool = False,
    has_stages: bool = False,
) -> RowLayout | DivisionRefusal:
    """Return the row layout of a model's call, found by computing a few rows; the model and random states are restored.

    Each candidate for the dims of the rows is tested: a few rows computed together must equal the same rows computed in
    two parts. ``batch_size`` is the loader's. ``tolerance`` applies if it is larger than the tolerance of a dtype.
    Objects of the user's modules are searched for stored values. ``device`` is this rank's. With ``shards_params`` the
    strategy replaces parameters in a forward pass. With ``has_stages`` each rank draws for its own blocks and
    micro-batches, so draws are not compared, and dropout layers are left out.
    """
    for leaf in find_leaves([args, kwargs]):
        if not isinstance(leaf, (Tensor, *_PLAIN, *_CODE)):
            return DivisionRefusal(f"it takes a {type(leaf).__name__}")
    tensors = list(find_tensors([args, kwargs]))
    if not all(map(is_divisible, tensors)):
        return DivisionRefusal("it takes tensors of a subclass, or sparse or quantized ones")
    refusal: DivisionRefusal | None = None
    sizes = _possible_sizes(tensors, batch_size)
    if sizes and max(sizes) < _MIN_CHECKED:
        return TOO_FEW_ROWS
    for dims, total in _candidates(tensors, sizes):
        check = _LayoutCheck(
            model,
            forward,
            args,
            kwargs,
            tensors,
            dims,
            total,
            tolerance,
            device,
            shards_params,
            is_compiled,
            has_stages,
        )
        found = check.run()
        if isinstance(found, RowLayout):
            return found
        refusal = refusal or found  # the likeliest candidate has the true reason
    return refusal or DivisionRefusal("no dim of its inputs is that of the samples")


def _possible_sizes(tensors: Sequence[Tensor], batch_size: int | None) -> list[int]:
    """Return sizes of dims that may be those of the rows, the likeliest first."""
    first = next((tensor for tensor in tensors if tensor.dim()), None)
    if first is None:
        return []
    sizes = [batch_size] if batch_size and any(batch_size in tensor.shape for tensor in tensors) else []
    return [*sizes, first.shape[0]] if first.shape[0] not in sizes else sizes


def _candidates(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[tuple[tuple[int | None, ...], int]]:
    """Yield candidates for the dims of the rows, the likeliest first, each with the number of rows."""
    seen: set[tuple[int | None, ...]] = set()
    for size in sizes:
        for is_second in (False, True):
            dims = tuple(_find_dim(tensor, size, is_second) for tensor in tensors)
            if size >= _MIN_CHECKED and dims not in seen and any(dim is not None for dim in dims):
                seen.add(dims)
                yield dims, size


def _find_dim(tensor: Tensor, size: int, is_second: bool) -> int | None:
    """Return the first dim that has a size, or with ``is_second`` the second such dim if any; None if no dim has it."""
    found = [dim for dim, value in enumerate(tensor.shape) if value == size]
    if is_second and len(found) > 1:
        return found[1]
    return found[0] if found else None


class _LayoutCheck:
    """The check of one candidate for the dims of the rows."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        dims: tuple[int | None, ...],
        total: int,
        tolerance: float,
        device: str,
        shards_params: bool,
        is_compiled: bool,
        has_stages: bool,
    ) -> None:
        self._model, self._forward, self._nested = model, forward, (list(args), dict(kwargs))
        self._tensors, self._dims, self._total, self._tolerance = tensors, dims, total, tolerance
        self._device, self._shards_params, self._is_compiled = device, shards_params, is_compiled
        self._has_stages = has_stages

    def run(self) -> RowLayout | DivisionRefusal:
        """Compute the rows together and in two parts; return the layout, or the reason if the results differ."""
        rows = self._choose_rows()
        if rows is None:
            return DivisionRefusal("all of its samples are equal", is_final=False)
        number = len(rows)
        half = number // 2
        try:
            with contextlib.nullcontext() if self._shards_params else randomize_near_zero(self._model):
                runs = self._compute_parts(rows, half)
        except (AccelNbError, KeyboardInterrupt):
            raise
        except TrainsInForward:
            return DivisionRefusal(TRAINS_IN_FORWARD)
        except Exception as error:  # the model's own code cannot compute some rows of the batch
            return DivisionRefusal(part_problem(error))
        reason = _reason_to_refuse(runs, self._tolerance)
        if reason is not None:
            return DivisionRefusal(reason)
        whole, first, second = (run.output for run in runs)
        outputs: list[int | Reduction | None] = []
        for parts in zip(find_leaves([whole]), find_leaves([first]), find_leaves([second]), strict=True):
            if not isinstance(parts[0], Tensor):
                if not isinstance(parts[0], _PLAIN):
                    return DivisionRefusal(f"it returns a {type(parts[0]).__name__}")
                if not parts[0] == parts[1] == parts[2]:
                    return DivisionRefusal("it returns a number that depends on the batch")
                continue
            dim = _output_dim(*parts, half)
            if (
                dim is None
                and is_equal(parts[0], parts[1], self._tolerance)
                and is_equal(parts[0], parts[2], self._tolerance)
            ):
                outputs.append(None)
            elif dim is None and all(part.numel() == 1 for part in parts):
                reduction = self._find_reduction(*parts, half, number, [run.weights[len(outputs)] for run in runs])
                if reduction is None:
                    return DivisionRefusal("it compares the samples of the batch with each other")
                outputs.append(reduction)
            elif dim is None:
                return DivisionRefusal("its output has no dim for the samples")
            elif not is_equal(parts[0], torch.cat(parts[1:], dim), self._tolerance):
                return DivisionRefusal("it computes with several samples together")
            else:
                outputs.append(dim)
        if all(dim is None for dim in outputs):
            return DivisionRefusal("its output does not depend on the batch")
        return RowLayout(
            self._dims,
            tuple(outputs),
            self._is_compiled or runs[0].has_drawn,
            runs[1].draws,
            next((run.random_problem for run in runs if run.random_problem is not None), None),
            tuple(read if read is ANY_VALUE else (read,) for read in values_to_compare(*[run.reads for run in runs])),
        )

    def _find_reduction(
        self, whole: Tensor, first: Tensor, second: Tensor, half: int, number: int, weights: Sequence[float | None]
    ) -> Reduction | None:
        """Return the reduction by which the value for all rows results from those for the two parts.

        None without one.
        """
        total, one, other = float(whole), float(first), float(second)
        allowed = max(self._tolerance, _TOLERANCE.get(whole.dtype, _HALF_TOLERANCE)) * max(abs(one), abs(other), 1e-12)
        is_sum = abs(total - one - other) <= allowed
        is_mean = abs(total - (half * one + (number - half) * other) / number) <= allowed
        _, first_weight, second_weight = weights
        if first_weight and second_weight:  # also if it is a mean: in other batches rows may have other weights
            weight = first_weight + second_weight
            is_weighted = abs(total - (first_weight * one + second_weight * other) / weight) <= allowed
            return "weighted" if is_weighted and not is_sum else None
        if is_sum == is_mean:
            return None
        return "sum" if is_sum else "mean"

    def _choose_rows(self) -> list[int] | None:
        """Return the indices of the rows to check, two of which differ; None if all rows of the batch are equal."""
        number = min(NUM_CHECKED, self._total)
        rows = list(range(number))
        inputs = [
            tensor.movedim(dim, 0) for tensor, dim in zip(self._tensors, self._dims, strict=True) if dim is not None
        ]
        for row in range(1, self._total):
            if any(not torch.equal(value[row], value[0]) for value in inputs):
                if row >= number:
                    rows[-1] = row
                return rows
        return None

    def _compute_parts(self, rows: list[int], half: int) -> tuple[_Run, _Run, _Run]:
        number, shapes = len(rows), DrawnShapes()
        return (
            self._compute(rows, 0, number, shapes, is_whole=True),
            self._compute(rows[:half], 0, number, ComparedShapes(shapes)),
            self._compute(rows[half:], half, number, ComparedShapes(shapes)),
        )

    def _compute(
        self, rows: list[int], start: int, total: int, draws: DrawnShapes | ComparedShapes, *, is_whole: bool = False
    ) -> _Run:
        """Compute some rows and restore all state; with ``is_whole`` examine which state and random numbers matter."""
        args, kwargs = arguments = copied_arguments(self._select(rows))
        argument_changes = ArgumentChanges(arguments)
        random = RowRandom(start, len(rows), total, draws)
        random_reads, code = RandomReads(), BackwardCode()
        reads: list[Any] = []
        printed = io.StringIO()
        state = self._take_snapshot()
        parameters = () if self._shards_params else self._model.named_parameters()
        tensors = [*parameters, *self._model.named_buffers(), *state.uncopied]
        writes = None if self._is_compiled else TensorWrites(tensors)
        states = rng.capture(self._device)
        try:
            with self._fixed_layers() as has_norms:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(self._grad_mode())
                    stack.enter_context(contextlib.redirect_stdout(printed))
                    stack.enter_context(code.observe())
                    if writes is not None:
                        stack.enter_context(writes)
                        if not self._has_stages:
                            stack.enter_context(random)
                        stack.enter_context(random_reads)
                        stack.enter_context(observed_reads(reads.append))
                    output = self._forward(*args, **kwargs)
                changes_arguments = argument_changes.has_any()
                weights = [_weight_of(tensor) for tensor in find_tensors(output)]
                output = map_tensors(lambda tensor: tensor.detach().clone(), output)
                used = rng.capture(self._device, parts=("python", "numpy"))
                repeated = ()
                if is_whole and not changes_arguments and writes is not None and state.changes().user_names:
                    repeated = self._find_repeated_changes(args, kwargs)
        finally:
            rewritten = [] if writes is None else writes.unchanged()
            changes = state.restore()
            written = {} if writes is None else writes.restore()
            rng.restore(states, self._device)
        has_python_draws = bool(changes.generators) or any(not torch.equal(used[key], states[key]) for key in used)
        return _Run(
            output,
            weights,
            effects=changes.values | written | {"stdout": printed.getvalue()},
            changes_arguments=changes_arguments,
            reads=reads,
            has_drawn=random.has_drawn,
            draws=tuple(draws.draws) if isinstance(draws, ComparedShapes) else (),
            random_problem=random.problem or (draws.problem if isinstance(draws, ComparedShapes) else None),
            has_python_draws=has_python_draws,
            has_read_random=random_reads.has_read,
            repeated_changes=repeated,
            rewritten=rewritten,
            has_recomputation=code.has_checkpoints and (has_norms or random.has_drawn),
            has_own_gradients=code.has_own_gradients,
        )

    def _select(self, rows: list[int]) -> Any:
        """Return the arguments with some of their rows."""
        dims = iter(self._dims)

        def choose(tensor: Tensor) -> Tensor:
            dim = next(dims)
            chosen = tensor.detach()
            return chosen if dim is None else chosen.index_select(dim, torch.tensor(rows, device=tensor.device))

        return map_tensors(choose, self._nested)

    def _grad_mode(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context with the mode of the call, since a model may read it, or without gradients in two cases.

        Hooks that gather sharded parameters expect a backward pass after a call with gradients, and a compiled model
        would be compiled a second time.
        """
        return torch.no_grad() if self._shards_params or self._is_compiled else contextlib.nullcontext()

    @contextlib.contextmanager
    def _fixed_layers(self) -> Iterator[bool]:
        """Use the running statistics of batch normalization in the block; yield whether that changes the computation.

        With stages, whose ranks draw for their own blocks, dropout layers are left out too.
        """
        trained = [part for part in self._model.modules() if part.training]
        norms = [part for part in trained if isinstance(part, _BatchNorm)]
        fixed = [*norms, *(part for part in trained if self._has_stages and isinstance(part, _DropoutNd))]
        try:
            for part in fixed:
                part.training = False
            yield bool(norms)
        finally:
            for part in fixed:
                part.training = True

    def _take_snapshot(self) -> ModuleSnapshot:
        return ModuleSnapshot(self._model, shards_params=self._shards_params)

    def _find_repeated_changes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of values that a second call changes too, as of a counter, unlike a cache."""
        state = self._take_snapshot()
        with contextlib.ExitStack() as stack:
            if self._shards_params:
                stack.enter_context(torch.no_grad())
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(BackwardCode().observe())
            self._forward(*args, **kwargs)
        return state.restore().user_names


@dataclass(frozen=True)
class _Run:
    """Result and effects of a forward pass of some rows."""

    output: Any
    weights: list[float | None]
    """For each tensor of the output: the total weight by which a loss was divided."""
    effects: dict[str, Any]
    """The stored values and the printed text."""
    changes_arguments: bool
    reads: list[Any]
    has_drawn: bool
    draws: tuple[Draw, ...]
    random_problem: str | None
    has_python_draws: bool
    """Whether it drew from generators of Python or NumPy."""
    has_read_random: bool
    """Whether its code read random numbers of torch."""
    repeated_changes: tuple[str, ...]
    """The names of the user's state that it changes in each call."""
    rewritten: list[str]
    """The names of the tensors that it wrote without a change, such as the largest value of all batches."""
    has_recomputation: bool
    """Whether the backward pass computes parts again that draw random numbers or use statistics of the batch."""
    has_own_gradients: bool
    """Whether the user's code computes or reads gradients inside of it."""


def _reason_to_refuse(runs: tuple[_Run, _Run, _Run], tolerance: float) -> str | None:
    """Return the reason for not dividing calls of a model, other than its output; None if there is none.

    A model whose code changes its own state, or branches on random numbers, may compute otherwise in a later call.
    """
    whole, *parts = runs
    if any(run.changes_arguments for run in runs):
        return CHANGES_ARGUMENTS
    if whole.has_python_draws:
        return "its code draws random numbers by Python or NumPy"
    if whole.has_read_random:
        return "its code reads random numbers"
    if whole.has_recomputation:
        return "`torch.utils.checkpoint` computes parts of it again"
    if whole.has_own_gradients:
        return OWN_GRADIENTS
    if not all(is_equal(whole.effects, part.effects, tolerance) for part in parts):
        return "it stores or prints values that depend on the batch"
    if whole.repeated_changes:
        return f"its code changes {', '.join(f'`{name}`' for name in whole.repeated_changes[:3])}"
    if whole.rewritten:
        return f"a forward pass writes to {', '.join(f'`{name}`' for name in whole.rewritten[:3])}"
    if not all(signature_of(whole.output) == signature_of(part.output) for part in parts):
        return "the kind of its output depends on the batch"
    return None


def find_weighted_loss(value: Tensor) -> WeightedLoss | None:
    """Return the torch loss that computed a value as a weighted mean, by the value's autograd graph; else None."""
    found = LossClassifier().classify(value, 1) if value.numel() == 1 and value.grad_fn is not None else None
    return found if isinstance(found, WeightedLoss) and found.divisor is None else None


def _weight_of(value: Tensor) -> float | None:
    loss = find_weighted_loss(value)
    return None if loss is None else float(loss.total)


def _output_dim(whole: Tensor, first: Tensor, second: Tensor, half: int) -> int | None:
    """Return the dim of the rows of an output; None if it has none."""
    if not whole.dim() == first.dim() == second.dim():
        return None
    changed = [dim for dim in range(whole.dim()) if whole.shape[dim] != first.shape[dim]]
    if len(changed) != 1:
        return None
    dim = changed[0]
    fits = first.shape[dim] + second.shape[dim] == whole.shape[dim] and first.shape[dim] % half == 0
    rest = first.shape[:dim] == second.shape[:dim] == whole.shape[:dim]
    return (
        dim if fits and rest and first.shape[dim + 1 :] == second.shape[dim + 1 :] == whole.shape[dim + 1 :] else None
    )


def is_equal(one: Any, other: Any, tolerance: float, factor: float = 1.0) -> bool:
    """Return whether values are equal within ``tolerance``, or ``factor`` times their dtypes' tolerance if larger."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape):
            return False
        if not one.is_floating_point() and not one.is_complex():
            return torch.equal(one, other)
        allowed = max(tolerance, factor * _TOLERANCE.get(one.dtype, _HALF_TOLERANCE))
        scale = torch.nan_to_num(one.detach().abs(), posinf=0.0).max() if one.numel() else 0.0
        return bool(torch.allclose(one, other, rtol=allowed, atol=float(allowed * scale), equal_nan=True))
    if isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        if one.dtype.kind not in "fc":
            return numpy.array_equal(one, other)
        return one.shape == other.shape and numpy.allclose(one, other, max(tolerance, factor * 1e-4), equal_nan=True)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key], tolerance, factor) for key in one)
    if isinstance(one, list | tuple | deque) and isinstance(other, list | tuple | deque):
        return len(one) == len(other) and all(
            is_equal(a, b, tolerance, factor) for a, b in zip(one, other, strict=True)
        )
    if is_dataclass(one):
        return type(one) is type(other) and is_equal(vars(one), vars(other), tolerance, factor)
    if isinstance(one, (*_PLAIN, set, numpy.generic)):
        return bool(one == other)
    return type(one) is type(other)
