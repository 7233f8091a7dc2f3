"""Calls of prepared models that all ranks make with the same batch: each rank computes some of its rows.

A rank selects its rows of the arguments, computes the model on them, and exchanges the results, so that the call
returns the rows of all ranks. Outside of models every tensor and its gradient has the value that one device would
compute. If the dim of the rows is not found, or the model combines several samples, every rank computes all rows.
"""

from __future__ import annotations

import dataclasses
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

from accel_nb.accelerator.model_division.batch_norm import synchronized_batch_norm
from accel_nb.accelerator.model_division.module_state import ModuleSnapshot
from accel_nb.accelerator.model_division.row_layout import (
    DivisionRefusal,
    RowLayout,
    find_layout,
    is_equal,
    signature_of,
)
from accel_nb.accelerator.model_division.row_random import RowRandom
from accel_nb.accelerator.model_division.value_reads import observed_reads
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.data.order import contiguous_share
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.row_exchange import RowExchange
from accel_nb.runtime.tensors.nested import find_tensors, map_tensors
from accel_nb.runtime.tensors.transforms import is_transformed

Forward = Callable[..., Any]
Result = TypeVar("Result")

_HALF_TOLERANCE = 3e-2
_MIN_ROWS_PER_RANK = 2
"""With one row, code such as ``squeeze()`` behaves differently, and batch normalisation has no variance."""
_NUM_COMPARED = 32
"""How many elements of a call's arguments the ranks compare, in the first call, the second, the fourth, and so on."""
_ROUNDING = 1e-3


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
        is_user_module: Callable[[str | None], bool],
        has_stages: bool = False,
    ) -> None:
        self._stepper = stepper
        self._comm = comm
        self._is_compiled = is_compiled
        # Returns whether the user has registered hooks inside of a model: they would receive some of the rows only.
        self._has_hooks = has_hooks
        # Called with the name of a model that the ranks call with different values; then calls are not divided.
        self._on_unequal = on_unequal
        self._is_user_module = is_user_module
        # Whether other ranks compute other blocks of a model: then this one sees some of its random numbers and reads
        # only, and the stages draw from generators of their own.
        self._has_stages = has_stages
        self.exchange = RowExchange(comm)
        self.is_on = False
        # Whether a prepared model is being called: calls that its code makes of other models are not divided again.
        self.is_inside = False
        # By model, then by kind of call.
        self._kinds: weakref.WeakKeyDictionary[nn.Module, dict[Any, _KindOfCall]] = weakref.WeakKeyDictionary()
        # By class name, since `start_record`: the models whose calls were divided, and why other calls were not.
        self.divided: dict[str, None] = {}
        self.undivided: dict[str, DivisionRefusal] = {}

    def start_record(self) -> None:
        """Clear the records of divided models and of exchanged bytes."""
        self.divided.clear()
        self.undivided.clear()
        self.exchange.num_bytes = 0

    def clear_layouts(self) -> None:
        """Clear the row layouts, so that the next calls check the models again; call after hooks were registered."""
        self._kinds.clear()

    def wrap_forward(self, model: nn.Module, forward: Forward) -> Forward:
        """Return a function to call in place of a model's ``forward``, which divides the rows among the ranks."""
        self._kinds.pop(model, None)  # a model that is prepared again may have another forward
        reference = weakref.ref(model)
        shards_params = self._stepper.strategy.capabilities.shards_params

        def divided(*args: Any, **kwargs: Any) -> Any:
            if shards_params and self._is_called_directly(sys._getframe(2).f_globals.get("__name__")):
                # The cell calls ``model.forward``: hooks that gather parameters and reduce gradients run in calls only.
                called = reference()
                assert called is not None, "a model exists during its own call"
                return called(*args, **kwargs)
            if not self.is_on or self.is_inside or self._stepper.window.is_divided or self._stepper.has_rank_rng:
                return forward(*args, **kwargs)
            called = reference()
            assert called is not None, "a model exists during its own call"
            return self._call(called, forward, args, kwargs)

        return divided

    def _is_called_directly(self, caller: str | None) -> bool:
        return not self.is_inside and self._is_user_module(caller)

    def _call(self, model: nn.Module, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = type(model).__name__
        layout = self._get_layout(model, forward, args, kwargs)
        if isinstance(layout, DivisionRefusal):
            self.undivided[name] = layout
            return self._compute_whole(forward, args, kwargs)
        number = layout.num_rows(list(find_tensors([args, kwargs])))
        if number is None or number < _MIN_ROWS_PER_RANK * self._comm.world.size:
            self.undivided[name] = _TOO_FEW_ROWS
            return self._compute_whole(forward, args, kwargs)
        compares = any(layout.compared_reads) and not self._has_stages
        snapshot = self._take_snapshot(model) if compares else None
        try:
            result = self._compute_rows(
                model, forward, args, kwargs, layout, number, compares_reads=snapshot is not None
            )
        except _ReadsDiffer as error:
            assert snapshot is not None, "reads are compared"
            snapshot.restore()
            self._record_read_effect(error.number, snapshot, model, forward, args, kwargs, layout, number)
            return self._call(model, forward, args, kwargs)
        self.divided[name] = None
        return result

    def _take_snapshot(self, model: nn.Module) -> _Snapshot:
        shards_params = self._stepper.strategy.capabilities.shards_params
        state = ModuleSnapshot(model, shards_params=shards_params, is_user_module=self._is_user_module)
        return _Snapshot(state, self._comm.world.device)

    def _record_read_effect(
        self,
        read: int,
        snapshot: _Snapshot,
        model: nn.Module,
        forward: Forward,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        layout: RowLayout,
        num_rows: int,
    ) -> None:
        """Compute the batch divided and whole, and record whether a read value that differs among ranks matters.

        If both results are equal, ranks no longer compare this read; otherwise such calls are not divided any more.
        """
        with torch.no_grad():
            rows = self._compute_rows(model, forward, args, kwargs, layout, num_rows)
            snapshot.restore()
            whole = self._compute_whole(forward, args, kwargs)
            snapshot.restore()
        is_same = signature_of(rows) == signature_of(whole) and is_equal(rows, whole, self._tolerance)
        updated: RowLayout | DivisionRefusal = DivisionRefusal("its code depends on values of the batch")
        if not any(self._gather_codes(int(not is_same))):
            compared = tuple(item and number != read for number, item in enumerate(layout.compared_reads))
            updated = dataclasses.replace(layout, compared_reads=compared)
        for kind in self._kinds[model].values():
            if kind.layout is layout:
                kind.layout = updated

    def _compute_whole(self, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._mark_inside():
            return forward(*args, **kwargs)

    def _compute_rows(
        self,
        model: nn.Module,
        forward: Forward,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        layout: RowLayout,
        number: int,
        *,
        compares_reads: bool = False,
    ) -> Any:
        """Compute this rank's rows of a call, and return the rows of all ranks.

        With ``compares_reads`` it raises `_ReadsDiffer`, on all ranks, if the model's code reads values from tensors
        that differ among ranks.
        """
        name, ranks = type(model).__name__, self._comm.world.size
        sizes = [len(contiguous_share(number, ranks, rank)) for rank in range(ranks)]
        inputs, outputs = iter(layout.inputs), iter(layout.outputs)
        exchange, own = self.exchange, sizes[self._comm.world.rank]

        def select_rows(tensor: Tensor) -> Tensor:
            dim = next(inputs)
            if dim is None:
                return tensor
            if torch.is_grad_enabled() and tensor.requires_grad:
                return exchange.take(tensor, dim, sizes)
            return tensor.narrow(dim, *exchange.own_range(sizes))

        def gather(tensor: Tensor) -> Tensor:
            dim = next(outputs)
            if dim is None:
                return tensor
            per_row, remainder = divmod(tensor.shape[dim], own)
            if remainder:
                raise MisuseError(_UNEXPECTED_ROWS.format(name=name, shape=tuple(tensor.shape), own=own))
            return exchange.gather(tensor, dim, [size * per_row for size in sizes])

        rows = map_tensors(select_rows, (list(args), dict(kwargs)))
        with ExitStack() as stack:
            stack.enter_context(self._mark_inside())
            stack.enter_context(self._as_one_device(model, layout, sizes))
            if compares_reads:
                stack.enter_context(observed_reads(self._compare_read(layout)))
            result = forward(*rows[0], **rows[1])
        if sum(1 for _ in find_tensors(result)) != len(layout.outputs):
            raise MisuseError(_UNEXPECTED_OUTPUT.format(name=name))
        return map_tensors(gather, result)

    def _compare_read(self, layout: RowLayout) -> Callable[[Any], None]:
        """Return a function that raises `_ReadsDiffer` for a value that differs among ranks but must be equal."""
        numbered = enumerate(layout.compared_reads)

        def compare(value: Any) -> None:
            number, is_compared = next(numbered, (0, False))
            if is_compared and not self._is_equal_on_ranks(zlib.crc32(repr(value).encode())):
                raise _ReadsDiffer(number)

        return compare

    @contextmanager
    def _mark_inside(self) -> Iterator[None]:
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    @contextmanager
    def _as_one_device(self, model: nn.Module, layout: RowLayout, sizes: Sequence[int]) -> Iterator[None]:
        """Compute batch normalisation and random numbers inside of the block as one device would."""
        with ExitStack() as stack:
            if any(isinstance(part, _BatchNorm) and part.training for part in model.modules()):
                stack.enter_context(synchronized_batch_norm(self.exchange))
            if layout.random_problem is not None and not self._has_stages:
                seed = int(torch.randint(2**62, ()))
                stack.enter_context(rng.fork_rng())
                rng.set_seed(rng.derive_seed(seed, "rank", self._comm.world.rank))
            elif layout.draws and not self._has_stages:
                start, size = self.exchange.own_range(sizes)
                stack.enter_context(RowRandom(start, size, sum(sizes), layout.first_dim))
            yield

    def _get_layout(
        self, model: nn.Module, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RowLayout | DivisionRefusal:
        kinds = self._kinds.get(model)
        if kinds is None:
            kinds = self._kinds[model] = {}
        has_gradients = torch.is_grad_enabled()
        if has_gradients and _has_swapped_parameters(model):
            return DivisionRefusal("it is called with other parameters than its own")
        if any(map(is_transformed, find_tensors([args, kwargs]))):
            return DivisionRefusal("torch.func transforms its calls", is_final=False)
        key = model.training, has_gradients, _num_hooks(model), signature_of([args, kwargs])
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _KindOfCall()
        kind.num_calls += 1
        if not kind.num_calls & (kind.num_calls - 1) and not self._has_equal_arguments(args, kwargs):
            self._on_unequal(type(model).__name__)
            return DivisionRefusal("the workers call it with different values", is_final=False)
        if kind.layout is None:
            found = self._find_layout(model, forward, args, kwargs)
            layout = self._agree_on_layout(found)
            if isinstance(layout, DivisionRefusal) and not layout.is_final:
                return layout
            kind.layout = layout
        return kind.layout

    def _has_equal_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether all ranks call a model with the same values, compared at a few elements of each tensor."""
        return self.has_equal_values(list(find_tensors([args, kwargs])))

    def has_equal_values(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors have the same shapes and, at a few elements, the same values on all ranks.

        All ranks must call it. Values may differ by rounding, as between machines.
        """
        few = [torch.zeros(0, dtype=torch.float64), *map(_few_values, tensors)]
        sample = torch.cat(few)[:_NUM_COMPARED]
        shapes = zlib.crc32(repr([tuple(tensor.shape) for tensor in tensors]).encode())
        message = torch.zeros(1 + _NUM_COMPARED, dtype=torch.float64)
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
        if any(_own_tensors(model)):
            return DivisionRefusal("it has tensors with gradients that are no parameters")
        share = self._stepper.window.share
        is_compiled = isinstance(model, OptimizedModule) or self._is_compiled(model)
        has_norms = any(isinstance(part, _BatchNorm) and part.training for part in model.modules())
        if is_compiled and has_norms:
            return DivisionRefusal("it is compiled, with batch normalisation")
        with self._mark_inside():
            return find_layout(
                model,
                forward,
                args,
                kwargs,
                batch_size=None if share is None else share.total_samples,
                tolerance=self._tolerance,
                is_user_module=self._is_user_module,
                shards_params=self._stepper.strategy.capabilities.shards_params,
                is_compiled=is_compiled,
            )

    def _agree_on_layout(self, found: RowLayout | DivisionRefusal) -> RowLayout | DivisionRefusal:
        """Return the layout if it is equal on all ranks: rounding, and so the check, may differ among machines."""
        code = zlib.crc32(repr(found).encode()) if isinstance(found, RowLayout) else 0
        if not self._is_equal_on_ranks(code) and not isinstance(found, DivisionRefusal):
            return DivisionRefusal("the ranks disagree about its rows")
        return found

    def _is_equal_on_ranks(self, code: int) -> bool:
        return len(set(self._gather_codes(code))) == 1

    def _gather_codes(self, code: int) -> list[int]:
        return [int(other) for other in self._comm.all_gather(torch.tensor([code], dtype=torch.int64))]

    @property
    def _tolerance(self) -> float:
        """The least relative tolerance: above 0 where the model computes in half precision and returns float32."""
        policy = self._stepper.strategy.precision.policy
        return 0.0 if policy.compute is None and not torch.is_autocast_enabled() else _HALF_TOLERANCE


@dataclasses.dataclass
class _KindOfCall:
    """The calls of a model with arguments of one signature."""

    layout: RowLayout | DivisionRefusal | None = None
    """The row layout, or why the calls are not divided; None: not known yet."""
    num_calls: int = 0


class _Snapshot:
    """A snapshot of a model's state and of the random states."""

    def __init__(self, model: ModuleSnapshot, device: str) -> None:
        self._device = device
        self._model, self._random = model, rng.capture(device)

    def restore(self) -> None:
        """Restore the model's state and the random states; may be called several times."""
        self._model.restore()
        rng.restore(self._random, self._device)


class _ReadsDiffer(Exception):
    """Raised if a model's code reads different values on the ranks; ``number`` is the index of the read in the call."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _few_values(tensor: Tensor) -> Tensor:
    """Return a few elements of a tensor, as real numbers on the CPU."""
    if tensor.layout is not torch.strided or tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return torch.zeros(0, dtype=torch.float64)
    flat = tensor.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // (_NUM_COMPARED // 4))][: _NUM_COMPARED // 4]
    return (torch.view_as_real(few).reshape(-1) if few.is_complex() else few).to("cpu", torch.float64)


def _own_tensors(model: nn.Module) -> Iterator[bool]:
    """Yield for each tensor in the attributes of a model's modules whether it is trained, but is no parameter."""
    for part in model.modules():
        for value in vars(part).values():
            items = value if isinstance(value, list | tuple) else [value]
            yield any(isinstance(item, Tensor) and item.is_leaf and item.requires_grad for item in items)


def _num_hooks(model: nn.Module) -> int:
    """Return the number of hooks on a model and its submodules; a change of it makes the model be checked again."""
    return sum(
        len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks) for part in model.modules()
    )


def _has_swapped_parameters(model: nn.Module) -> bool:
    """Whether parameters are currently replaced by other tensors, as in `torch.func.functional_call`."""
    return any(
        value is not None
        and (not value.is_leaf or (type(value) is not nn.Parameter and not isinstance(value, nn.Parameter)))
        for part in model.modules()
        for value in part._parameters.values()
    )


_TOO_FEW_ROWS = DivisionRefusal("its first batch has too few rows", is_final=False)

_UNEXPECTED_ROWS = (
    "{name} returned a tensor of shape {shape} for {own} rows of the batch: unlike in its first call, the rows cannot "
    "be found in it. With --divide none every worker computes the whole batch"
)


_UNEXPECTED_OUTPUT = (
    "{name} returned another number of tensors than in its first call with such arguments. With --divide none every "
    "worker computes the whole batch"
)
