"""Calls of prepared models that all ranks make with the same batch: each rank computes some of its rows.

A rank selects its rows of the arguments, computes the model on them, and exchanges the results, so that the call
returns the rows of all ranks. Outside of models every tensor and its gradient has the value that one device would
compute. If the dim of the rows is not found, or the model combines several samples, every rank computes all rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules.batchnorm import _BatchNorm

from accel_nb.accelerator.model_division.argument_changes import (
    CHANGES_ARGUMENTS,
    ArgumentChanges,
    copied_arguments,
)
from accel_nb.accelerator.model_division.backward_code import BackwardCode, TrainsInForward
from accel_nb.accelerator.model_division.batch_norm import means_with_deviations, synchronized_batch_norm
from accel_nb.accelerator.model_division.call_observers import has_modes, has_profiler, has_saved_tensor_hooks
from accel_nb.accelerator.model_division.calls_by_state import CallGroup, CallsByState
from accel_nb.accelerator.model_division.forward_only import drop_saved_tensors
from accel_nb.accelerator.model_division.model_structure import structure_of
from accel_nb.accelerator.model_division.module_state import Changes, ModuleSnapshot
from accel_nb.accelerator.model_division.overlapping_outputs import find_views, overlapping_pairs
from accel_nb.accelerator.model_division.reachable_state import find_trained_outside
from accel_nb.accelerator.model_division.read_comparison import (
    MAX_ACCEPTED,
    ReadComparison,
    RecordedReads,
    ResultMayDiffer,
    code_of,
)
from accel_nb.accelerator.model_division.related_outputs import RelatedOutputs
from accel_nb.accelerator.model_division.row_layout import (
    OWN_GRADIENTS,
    TOO_FEW_ROWS,
    TRAINS_IN_FORWARD,
    DivisionRefusal,
    Reduction,
    RowLayout,
    find_layout,
    find_weighted_loss,
    is_divisible,
    is_equal,
    part_problem,
    signature_of,
)
from accel_nb.accelerator.model_division.row_random import RecordedDims, RowRandom
from accel_nb.accelerator.model_division.uncompiled_code import leave_uncompiled
from accel_nb.accelerator.model_division.value_reads import ANY_VALUE, observed_reads
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.data.order import contiguous_share
from accel_nb.errors import AccelNbError, MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.distributed.row_exchange import RowExchange
from accel_nb.runtime.process.user_code import is_user_module
from accel_nb.runtime.tensors.instance_patching import innermost_class
from accel_nb.runtime.tensors.nested import find_leaves, find_tensors, map_tensors
from accel_nb.runtime.tensors.transforms import is_in_transform

Forward = Callable[..., Any]
Result = TypeVar("Result")

_HALF_TOLERANCE = 3e-2
_MIN_ROWS_PER_RANK = 2
"""With one row, code such as ``squeeze()`` behaves differently, and batch normalization has no variance."""
_NUM_COMPARED = 32
"""Number of elements of a call's arguments that the ranks compare, at most a quarter of them from one tensor.

They compare the first call, the second, the fourth, and so on.
"""
_ROUNDING = 1e-3
_ROUNDING_FACTOR = 10.0
"""Factor of the tolerance for a whole batch, relative to the few rows of a check: longer sums round more."""
_NO_ROWS = -1
_END = -1
"""Sent instead of the number of a read if the model's code has returned."""
_INTERRUPTED = (
    "{name} is called after an interrupt of the cell, which ranks get at different steps: they exchange nothing any "
    "more. Train in the next cell, which begins with rank 0's values; after model.eval(), or under torch.no_grad(), "
    "the call works here, unless the weights are divided among the ranks"
)
_SHAPES_DIFFER = "the shape of its output depends on values of the batch"


class DividedCalls:
    """Divides the calls of prepared models while ``is_on``. Every rank must make the same calls."""

    def __init__(
        self,
        stepper: Stepper,
        comm: Communicator,
        *,
        is_compiled: Callable[[nn.Module], bool],
        has_hooks: Callable[[nn.Module], bool],
        on_unequal: Callable[[str], object],
        on_difference: Callable[[str, int, str], object],
        has_stages: bool = False,
    ) -> None:
        self._stepper = stepper
        self._comm = comm
        self._is_compiled = is_compiled
        # Returns whether the user has registered hooks inside of a model: they would receive some of the rows only.
        self._has_hooks = has_hooks
        # Called with the name of a model that the ranks call with different values; then calls are not divided.
        self._on_unequal = on_unequal
        # Called with a model's name, a number of calls that were divided, and the reason why that was wrong.
        self._on_difference = on_difference
        # Whether other ranks compute other blocks of a model: then this rank records only some of its random draws and
        # reads, and the stages draw from separate generators.
        self._has_stages = has_stages
        self.exchange = RowExchange(comm)
        self.related = RelatedOutputs(self.exchange)
        self.is_on = False
        # A loader process that this one forks may call models too, and takes part in no collective.
        self._process = os.getpid()
        # Whether a prepared model is being called: calls that its code makes of other models are not divided again.
        self.is_inside = False
        # By class name, since `start_record`: the models whose calls were divided, and why other calls were not.
        self.divided: dict[str, None] = {}
        self.undivided: dict[str, DivisionRefusal] = {}

    def start_record(self) -> None:
        """Clear the records of divided models and of exchanged bytes."""
        self.divided.clear()
        self.undivided.clear()
        self.exchange.num_bytes = 0

    def wrap_forward(self, model: nn.Module, forward: Forward) -> Forward:
        """Return a function to call in place of a model's ``forward``, which divides the rows among the ranks."""
        calls = CallsByState()
        reference = weakref.ref(model)
        call = leave_uncompiled(self._call)
        shards_params = self._stepper.strategy.capabilities.shards_params

        def divided(*args: Any, **kwargs: Any) -> Any:
            if shards_params and self._is_called_directly(sys._getframe(2).f_globals.get("__name__")):
                # The cell calls ``model.forward``: hooks that gather parameters and reduce gradients run in calls only.
                called = reference()
                assert called is not None, "a model exists during its own call"
                # A ``__call__`` of the user's class may call ``forward``.
                has_own_call = innermost_class(called).__call__ is not nn.Module.__call__
                return (nn.Module if has_own_call else type(called)).__call__(called, *args, **kwargs)
            if self._stepper.computes_alone():
                if shards_params:
                    raise MisuseError(_SHARDED_IN_THREAD.format(name=type(reference()).__name__))
                return forward(*args, **kwargs)
            if self._stepper.computes_in_main_thread and DefaultGroup.is_interrupted:
                called = reference()
                if shards_params or (called is not None and called.training and torch.is_grad_enabled()):
                    raise MisuseError(_INTERRUPTED.format(name=type(called).__name__))
                return forward(*args, **kwargs)  # the whole batch, with the weights of this rank's step
            is_divided = self.is_on and not (self.is_inside or self._stepper.window.is_divided)
            if not is_divided or self._stepper.has_rank_rng or os.getpid() != self._process:
                return forward(*args, **kwargs)
            called = reference()
            assert called is not None, "a model exists during its own call"
            return call(calls, called, forward, args, kwargs)

        return divided

    def _is_called_directly(self, caller: str | None) -> bool:
        return not self.is_inside and is_user_module(caller)

    def _call(
        self,
        calls: CallsByState,
        model: nn.Module,
        forward: Forward,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        name = type(model).__name__
        group, layout = self._get_layout(calls, model, forward, args, kwargs)
        if isinstance(layout, DivisionRefusal):
            self.undivided[name] = layout
            return self._compute_whole(forward, args, kwargs)
        number = layout.num_rows(list(find_tensors([args, kwargs])))
        if number is None or number < _MIN_ROWS_PER_RANK * self._comm.world.size:
            self.undivided[name] = TOO_FEW_ROWS
            return self._compute_whole(forward, args, kwargs)
        call = _Call(model, forward, args, kwargs, layout, number)
        is_compared = layout.random_problem is None and not (self._has_stages or self._is_compiled_model(model))
        if group.is_checked_now and is_compared:
            return self._compare_with_whole(call, group)
        reads = bool(layout.reads) and is_compared
        snapshot = self._take_snapshot(model) if reads else None
        try:
            result = self._compute_rows(call, observe=ReadComparison(self._gather_codes_at, layout) if reads else None)
        except ResultMayDiffer as error:
            assert snapshot is not None, "reads are compared"
            snapshot.restore()
            return self._compare_with_whole(call, group, error)
        self.divided[name] = None
        group.num_divided += 1
        return result

    def _take_snapshot(self, model: nn.Module) -> _Snapshot:
        shards_params = self._stepper.strategy.capabilities.shards_params
        state = ModuleSnapshot(model, shards_params=shards_params)
        return _Snapshot(state, self._comm.world.device)

    def _compare_with_whole(self, call: _Call, group: CallGroup, cause: ResultMayDiffer | None = None) -> Any:
        """Compute a call whole and divided, and return the divided result; stop dividing if they differ.

        A divided call returns a divided result, so that rounding does not depend on which calls are compared.
        ``cause``: the call has read a new value, which is accepted from now on if the results are equal, or
        its shapes do not fit. Then earlier calls, which had other values and shapes, are not in doubt.
        """
        name = type(call.model).__name__
        snapshot = self._take_snapshot(call.model)
        observed = RecordedReads()
        try:
            whole, whole_effects, problem = self._compute_compared(call, snapshot)
            rows, problem = self._try_rows(call, observed) if problem is None else (None, problem)
        except TrainsInForward:
            whole, whole_effects, rows, problem = None, {}, None, TRAINS_IN_FORWARD
        has_rows = problem is None
        if has_rows:
            problem = _difference(rows, whole, snapshot.effects(), whole_effects, self._tolerance)
        codes = self._gather_codes(0 if problem is None else zlib.crc32(problem.encode()))
        if not any(codes):
            self.divided[name] = None
            group.num_divided += 1
            if cause is not None and cause.read is not None:
                reads = self._accept_read(call.layout, cause.read, observed.values)
                group.layout = dataclasses.replace(call.layout, reads=reads)
            return rows
        snapshot.restore()
        refusal = DivisionRefusal(problem or "on another rank its rows differ from the whole batch")
        group.layout = self.undivided[name] = refusal
        is_new = not has_rows or cause is not None or observed.has_new(call.layout)
        if not any(self._gather_codes(int(is_new))) and group.num_divided:
            self._on_difference(name, group.num_divided, refusal.reason)
        return self._compute_whole(call.forward, call.args, call.kwargs)

    def _compute_compared(self, call: _Call, snapshot: _Snapshot) -> tuple[Any, dict[str, Any], str | None]:
        """Return the result and the effects of a whole call, and the reason if it cannot be compared.

        The effects are undone; no tensors are saved for a backward pass.
        """

        def compute() -> tuple[Any, bool]:
            args, kwargs = arguments = copied_arguments((list(call.args), dict(call.kwargs)))
            changes = ArgumentChanges(arguments)
            return self._compute_whole(call.forward, args, kwargs), changes.has_any()

        without_graph = torch.no_grad if self._stepper.strategy.capabilities.shards_params else drop_saved_tensors
        with contextlib.redirect_stdout(io.StringIO()), BackwardCode().observe():
            try:
                with without_graph():
                    whole, has_changes = compute()
            except Exception:  # the code needs saved tensors, or uses `torch.func`, which allows no such hooks
                snapshot.restore()
                whole, has_changes = compute()
        problem = CHANGES_ARGUMENTS if has_changes else None
        return map_tensors(Tensor.detach, whole), snapshot.restore(), problem

    def _try_rows(self, call: _Call, observed: RecordedReads) -> tuple[Any, str | None]:
        """Return the rows of all ranks and None, or None and the reason."""
        code = BackwardCode()
        try:
            with code.observe():
                rows = self._compute_rows(call, observe=observed)
        except ResultMayDiffer as error:
            cause = error.__cause__
            return None, _SHAPES_DIFFER if cause is None else part_problem(cause)
        # Models with sharded weights are checked without gradients, and code then cannot register hooks on these.
        return (None, OWN_GRADIENTS) if code.has_own_gradients else (rows, None)

    def _accept_read(self, layout: RowLayout, read: int, values: list[Any]) -> tuple[Any, ...]:
        """Return the accepted values of each read, with this call's value, or `ANY_VALUE` if it differs among ranks."""
        value = values[read] if read < len(values) else None
        accepted = layout.reads[read]
        if len(set(self._gather_codes(code_of(value)))) > 1:
            value = ANY_VALUE
        updated = ANY_VALUE if len(accepted) >= MAX_ACCEPTED else (*accepted, value)
        return (*layout.reads[:read], updated, *layout.reads[read + 1 :])

    def _compute_whole(self, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._mark_in_call():
            return forward(*args, **kwargs)

    def _compute_rows(self, call: _Call, observe: Callable[[Any], None] | None) -> Any:
        """Compute this rank's rows of a call, and return the rows of all ranks.

        With ``observe``, which receives each value that the model's code reads from tensors, `ResultMayDiffer` is
        raised on all ranks if the model's code raises on one, or the shapes of their results do not fit together.
        """
        name, ranks, layout = type(call.model).__name__, self._comm.world.size, call.layout
        sizes = [len(contiguous_share(call.num_rows, ranks, rank)) for rank in range(ranks)]
        args, kwargs = rows = self._select_rows(call, sizes)
        changes = ArgumentChanges(rows)
        result: Any = None
        failure: Exception | None = None
        with ExitStack() as stack:
            stack.enter_context(self._mark_in_call())
            stack.enter_context(self._computing_like_one_device(call.model, layout, sizes))
            if observe is not None:
                stack.enter_context(observed_reads(observe))
            try:
                result = call.forward(*args, **kwargs)
            except (AccelNbError, ResultMayDiffer):
                raise
            except Exception as error:
                if observe is None:
                    raise
                failure = error
        if observe is not None:
            code = _NO_ROWS if failure is not None else _shape_code(result, layout, sizes[self._comm.world.rank])
            codes = self._gather_codes_at(_END, code)
            if len(set(codes)) > 1 or codes[0] == _NO_ROWS:
                raise ResultMayDiffer from failure
        if sum(1 for _ in find_tensors(result)) != len(layout.outputs):
            raise MisuseError(_UNEXPECTED_OUTPUT.format(name=name))
        if changes.has_any():
            raise MisuseError(_CHANGED_ARGUMENTS.format(name=name))
        return self._complete(call, rows, result, sizes)

    def _select_rows(self, call: _Call, sizes: Sequence[int]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call with this rank's rows; ``sizes`` are the numbers of rows of the ranks."""
        inputs, exchange, averaged = iter(call.layout.inputs), self.exchange, self._stepper.averaged_parameters

        def select(tensor: Tensor) -> Tensor:
            dim = next(inputs)
            if not (torch.is_grad_enabled() and tensor.requires_grad):
                return tensor if dim is None else tensor.narrow(dim, *exchange.own_range(sizes))
            if dim is not None:
                return exchange.take(tensor, dim, sizes)
            return tensor if id(tensor) in averaged else exchange.replicate(tensor)

        return map_tensors(select, (list(call.args), dict(call.kwargs)))

    def _complete(self, call: _Call, rows: Any, result: Any, sizes: Sequence[int]) -> Any:
        """Return the result of a call for all ranks' rows, from this rank's result for its ``rows`` of the arguments.

        A tensor that the model has returned twice is one tensor, a returned argument is the argument itself, and a
        view is a view.
        """
        name, own = type(call.model).__name__, sizes[self._comm.world.rank]
        gathered: list[tuple[Tensor, Tensor, int, list[int]]] = []
        arguments = find_tensors((list(call.args), dict(call.kwargs)))
        known = {id(part): whole for part, whole in zip(find_tensors(rows), arguments, strict=True)}

        def gather(tensor: Tensor, dim: int | Reduction | None) -> Tensor:
            if dim is None:
                return tensor
            if isinstance(dim, str):
                return self._reduce(tensor, dim, sizes)
            per_row, remainder = divmod(tensor.shape[dim], own) if dim < tensor.dim() else (0, own)
            if remainder:
                raise MisuseError(_UNEXPECTED_ROWS.format(name=name, shape=tuple(tensor.shape), own=own))
            numbers = [size * per_row for size in sizes]
            whole = self.exchange.gather(tensor, dim, numbers)
            gathered.append((whole, tensor, dim, numbers))
            return whole

        parts = list(find_tensors(result))
        dims = dict(zip(map(id, parts), call.layout.outputs, strict=True))
        views = find_views([(part, dims[id(part)]) for part in parts])

        def complete(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                base, view = views.get(id(tensor), (tensor, None))
                if id(base) not in known:
                    known[id(base)] = gather(base, dims[id(base)])
                if view is not None:
                    known[id(tensor)] = view.of(known[id(base)])
            return known[id(tensor)]

        whole = map_tensors(complete, result)
        self.related.record(gathered)
        return whole

    def _reduce(self, part: Tensor, reduction: Reduction, sizes: Sequence[int]) -> Tensor:
        """Return the value for all rows, given each rank's value for its rows."""
        if reduction == "sum":
            return self.exchange.reduce(part, None)
        if reduction == "mean":
            return self.exchange.reduce(part, torch.tensor(sizes, device=part.device))
        loss = find_weighted_loss(part)
        weight = part.new_zeros(()) if loss is None else loss.total.detach().to(part).view(())
        if loss is not None:
            loss.drop_gradient_unless(weight > 0)
        return self.exchange.reduce(part, self.exchange.stack(weight))

    @contextmanager
    def _mark_in_call(self) -> Iterator[None]:
        try:
            self.is_inside = True
            yield
        finally:
            self.is_inside = False

    @contextmanager
    def _computing_like_one_device(self, model: nn.Module, layout: RowLayout, sizes: Sequence[int]) -> Iterator[None]:
        """Compute batch normalization and random numbers inside of the block as one device would."""
        with ExitStack() as stack:
            if any(isinstance(part, _BatchNorm) and part.training for part in model.modules()):
                stack.enter_context(synchronized_batch_norm(self.exchange))
            if layout.random_problem is not None and not self._has_stages:
                seed = int(torch.randint(2**62, (), device="cpu"))
                stack.enter_context(rng.fork_rng())
                rng.set_seed(rng.derive_seed(seed, "rank", self._comm.world.rank))
            elif layout.has_draws and not self._has_stages:
                start, size = self.exchange.own_range(sizes)
                stack.enter_context(RowRandom(start, size, sum(sizes), RecordedDims(layout.draws)))
            yield

    def _get_layout(
        self,
        calls: CallsByState,
        model: nn.Module,
        forward: Forward,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[CallGroup, RowLayout | DivisionRefusal]:
        has_gradients = torch.is_grad_enabled()
        leaves = list(find_leaves([args, kwargs]))
        has_nested = any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves)
        # A nested tensor has no shape.
        values = () if has_nested else tuple([_size_or_number(leaf) for leaf in leaves])
        group = calls.find(model, (has_gradients, structure_of(model), signature_of([args, kwargs])), values)
        if has_nested:
            return group, DivisionRefusal("it takes a nested tensor")
        if is_in_transform():
            return group, DivisionRefusal("torch.func transforms its calls", is_final=False)
        if has_gradients and self._has_swapped_parameters(model):
            return group, DivisionRefusal("it is called with other parameters than its own")
        if has_modes():
            return group, DivisionRefusal("a mode of the user's code receives the calls inside of it", is_final=False)
        if has_profiler():
            return group, DivisionRefusal("a profiler receives the calls inside of it", is_final=False)
        if has_gradients and has_saved_tensor_hooks():
            return group, DivisionRefusal("hooks receive the tensors that it saves", is_final=False)
        if group.is_checked_now and not self._has_equal_arguments(args, kwargs):
            self._on_unequal(type(model).__name__)
            return group, DivisionRefusal("the workers call it with different values", is_final=False)
        if group.layout is None:
            layout = self._agree_on_layout(self._find_layout(model, forward, args, kwargs))
            if (
                self._has_stages
                and isinstance(layout, RowLayout)
                and any(isinstance(dim, str) for dim in layout.outputs)
            ):
                layout = DivisionRefusal("it has stages and computes the loss itself; --divide data reads shares")
            if isinstance(layout, DivisionRefusal) and not layout.is_final:
                return group, layout
            group.layout = layout
        return group, group.layout

    def _has_equal_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether all ranks call a model with the same values, compared at a few elements of each tensor."""
        return self.has_equal_values(list(find_tensors([args, kwargs])))

    def has_equal_values(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors have the same shapes and, at a few elements, the same values on all ranks.

        All ranks must call it. Values may differ by rounding, as between machines.
        """
        few = [torch.zeros(0, dtype=torch.float64, device="cpu"), *map(_few_values, tensors)]
        sample = torch.cat(few)[:_NUM_COMPARED]
        shapes = zlib.crc32(repr([tuple(tensor.shape) for tensor in tensors]).encode())
        message = torch.zeros(1 + _NUM_COMPARED, dtype=torch.float64, device="cpu")
        message[0], message[1 : 1 + len(sample)] = shapes, sample
        first, *others = self._comm.all_gather(message)
        scale = torch.nan_to_num(first[1:].abs(), posinf=0.0).max()
        return all(
            bool(first[0] == other[0])
            and torch.allclose(first[1:], other[1:], rtol=_ROUNDING, atol=float(_ROUNDING * scale), equal_nan=True)
            for other in others
        )

    def _find_layout(
        self, model: nn.Module, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RowLayout | DivisionRefusal:
        if self._has_hooks(model):
            return DivisionRefusal("hooks read or change its values")
        if (other := find_trained_outside(model)) is not None:
            return DivisionRefusal(f"its code uses `{other}`, which is not part of it")
        share = self._stepper.window.share
        is_compiled = self._is_compiled_model(model)
        has_norms = any(isinstance(part, _BatchNorm) and part.training for part in model.modules())
        if is_compiled and has_norms:
            return DivisionRefusal("it is compiled, with batch normalization")
        with self._mark_in_call():
            return find_layout(
                model,
                forward,
                args,
                kwargs,
                batch_size=None if share is None else share.total_samples,
                tolerance=self._tolerance,
                shards_params=self._stepper.strategy.capabilities.shards_params,
                is_compiled=is_compiled,
                device=self._comm.world.device,
                has_stages=self._has_stages,
            )

    def _has_swapped_parameters(self, model: nn.Module) -> bool:
        """Return whether parameters are currently replaced by others, as in `torch.func.functional_call`."""
        if self._stepper.strategy.capabilities.shards_params:  # it replaces them by gathered ones itself
            return any(not value.is_leaf for value in _trained_parameters(model))
        averaged = self._stepper.averaged_parameters
        return any(id(value) not in averaged for value in _trained_parameters(model))

    def _is_compiled_model(self, model: nn.Module) -> bool:
        return isinstance(model, OptimizedModule) or self._is_compiled(model)

    def _agree_on_layout(self, layout: RowLayout | DivisionRefusal) -> RowLayout | DivisionRefusal:
        """Return the layout if it is equal on all ranks: rounding, and so the check, may differ among machines."""
        code = zlib.crc32(repr(layout).encode()) if isinstance(layout, RowLayout) else int(layout.is_final)
        if self._is_equal_on_ranks(code):
            return layout
        # Final on all ranks: else only some would search again in the next call.
        return DivisionRefusal(
            layout.reason if isinstance(layout, DivisionRefusal) else "the ranks disagree about its rows"
        )

    def _is_equal_on_ranks(self, code: int) -> bool:
        return len(set(self._gather_codes(code))) == 1

    def _gather_codes(self, code: int) -> list[int]:
        return [int(other) for other in self._comm.all_gather(torch.tensor([code], dtype=torch.int64, device="cpu"))]

    def _gather_codes_at(self, place: int, code: int) -> list[int]:
        """Return the codes of all ranks at the same place of a call: the number of a read, or `_END`.

        Raises `ResultMayDiffer` on all ranks if one is at another place: its rows took another branch.
        """
        message = torch.tensor([place, code], dtype=torch.int64, device="cpu")
        places, codes = zip(*(other.tolist() for other in self._comm.all_gather(message)), strict=True)
        if len(set(places)) > 1:
            raise ResultMayDiffer
        return list(codes)

    @property
    def _tolerance(self) -> float:
        """The minimum relative tolerance: above 0 if the model computes in half precision and returns float32."""
        policy = self._stepper.strategy.precision.policy
        return 0.0 if policy.compute is None and not torch.is_autocast_enabled() else _HALF_TOLERANCE


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a model that is divided."""

    model: nn.Module
    forward: Forward
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    layout: RowLayout
    num_rows: int


class _Snapshot:
    """A snapshot of a model's state and of the random states."""

    def __init__(self, model: ModuleSnapshot, device: str) -> None:
        self._device = device
        self._model, self._random = model, rng.capture(device)

    def effects(self) -> dict[str, Any]:
        """Return the values that have changed since the snapshot, and the random states."""
        return _effects(self._model.changes(), rng.capture(self._device))

    def restore(self) -> dict[str, Any]:
        """Restore the model's state and the random states, and return `effects`; may be called several times."""
        random = rng.capture(self._device)
        effects = _effects(self._model.restore(), random)
        rng.restore(self._random, self._device)
        return effects


def _effects(changes: Changes, random: Mapping[str, Tensor]) -> dict[str, Any]:
    return changes.values | {f"random {name}": state for name, state in random.items()}


def _shape_code(result: Any, layout: RowLayout, own: int) -> int:
    """Return a number that is equal on ranks whose results fit together; `_NO_ROWS` if rows cannot be found."""
    tensors = list(find_tensors(result))
    if len(tensors) != len(layout.outputs):
        return _NO_ROWS
    shapes: list[tuple[int, ...]] = []
    for tensor, dim in zip(tensors, layout.outputs, strict=True):
        shape = tuple(tensor.shape)
        if isinstance(dim, int):
            if dim >= len(shape) or shape[dim] % own:
                return _NO_ROWS
            shape = (*shape[:dim], shape[dim] // own, *shape[dim + 1 :])
        shapes.append(shape)
    return code_of(shapes)


def _difference(
    rows: Any, whole: Any, effects: Mapping[str, Any], whole_effects: Mapping[str, Any], tolerance: float
) -> str | None:
    """Return the difference between a divided call and the whole call, as text; None if they are equal."""
    if signature_of(rows) != signature_of(whole):
        return "the kind of its output depends on the batch"
    if overlapping_pairs(list(find_tensors(rows))) != overlapping_pairs(list(find_tensors(whole))):
        return "its outputs overlap in memory"
    if not is_equal(rows, whole, tolerance, _ROUNDING_FACTOR):
        return "it computes with several samples together"
    state, whole_state = means_with_deviations(effects), means_with_deviations(whole_effects)
    if state.keys() != whole_state.keys() or not is_equal(state, whole_state, tolerance, _ROUNDING_FACTOR):
        return "its state or its random numbers depend on the batch as a whole"
    return None


def _size_or_number(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape
    return leaf if isinstance(leaf, int | float) else None


def _few_values(tensor: Tensor) -> Tensor:
    """Return a few elements of a tensor, as real numbers on the CPU."""
    if not is_divisible(tensor) or tensor.is_meta:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    flat = tensor.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // (_NUM_COMPARED // 4))][: _NUM_COMPARED // 4]
    real = torch.view_as_real(few.resolve_conj()).reshape(-1) if few.is_complex() else few
    return real.to("cpu", torch.float64)


def _trained_parameters(model: nn.Module) -> Iterator[Tensor]:
    for part in model.modules():
        yield from (value for value in part._parameters.values() if value is not None and value.requires_grad)


_SHARDED_IN_THREAD = (
    "{name} is called in a thread that the cell has started: each worker holds a shard of it, and threads of several "
    "workers take their turns in different orders. Call it in the cell itself, or without sharding"
)

_UNEXPECTED_ROWS = (
    "{name} returned a tensor of shape {shape} for {own} rows of the batch: unlike in its first call, the rows cannot "
    "be found in it. With --divide none every worker computes the whole batch"
)


_CHANGED_ARGUMENTS = (
    "{name} changes its arguments, such as by an operation in place, unlike in its first calls: this worker's rows "
    "were changed, and not those of the other workers. With --divide none every worker computes the whole batch"
)

_UNEXPECTED_OUTPUT = (
    "{name} returned another number of tensors than in its first call with such arguments. With --divide none every "
    "worker computes the whole batch"
)
