"""Computation of a model's block for a shard of its sequence, and the trial that decides how it is done.

A trial computes a copy of the block in float64 on the CPU with random weights and a short sequence, whole and in
shards, with threads in place of ranks. The block is computed in shards only if outputs and all gradients are equal.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.distributed.sequence_exchange import SequenceExchange
from accel_nb.runtime.tensors.module_paths import submodule_at
from accel_nb.runtime.tensors.nested import find_leaves, find_tensors, map_tensors
from accel_nb.strategies.block_calls import chain_input
from accel_nb.strategies.context_parallel.sharded_functions import (
    OTHER_CALLS,
    AttentionKind,
    MakeMask,
    SequenceShard,
    replaced_functions,
    whole_sequence,
)
from accel_nb.strategies.trials import ThreadCommunicator, TrialFailed, is_close, random_copy, run_threads

MIN_SHARD = 2
"""Minimum length of a shard: a dim of length 1 could be squeezed or broadcast."""

_TOLERANCE = 1e-9
_LENGTHS = (13, 17, 19, 23, 29, 31, 37)
_ROWS = 2
_MAX_PARTS = 3
_SEED = 1
_OTHER_OUTPUTS = "parts of the sequence give outputs of other shapes than the whole"


@dataclass(frozen=True)
class BlockPlan:
    """The dims along which the tensors of a block are sharded, in the order of the tensors; None: not sharded.

    ``dim`` is the dim of the sequence in the block's input. ``attention`` has the kind of each call. ``part`` is the
    name of a module inside of the block that each rank computes for the whole sequence; empty if there is none.
    """

    dim: int
    arguments: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    attention: tuple[AttentionKind, ...]
    part: str = ""


def compute_shard(
    block: nn.Module,
    forward: Callable[..., Any],
    plan: BlockPlan,
    exchange: SequenceExchange,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    make_mask: MakeMask | None = None,
) -> Any:
    """Return a block's output for this rank's shard of whole arguments; call it inside of `replaced_functions`."""
    dims = iter(plan.arguments)

    def shard_argument(tensor: Tensor) -> Tensor:
        dim = next(dims)
        if dim is not None:
            return exchange.shard(tensor, dim)
        return exchange.replicate(tensor) if torch.is_grad_enabled() and tensor.requires_grad else tensor

    own_args, own_kwargs = map_tensors(shard_argument, (list(args), dict(kwargs)))
    shard = SequenceShard(exchange, length_of(plan, args, kwargs), plan.dim, plan.attention, make_mask)
    with shard.computing(), _whole_part(block, plan.part, shard):
        output = forward(*own_args, **own_kwargs)
    if not plan.part and len(shard.found) != len(plan.attention):
        raise MisuseError(OTHER_CALLS)
    return output


def join_shards(output: Any, dims: Sequence[int | None], exchange: SequenceExchange, length: int) -> Any:
    """Return the whole output of a block from this rank's output for its shard; every rank must call."""
    tensors = list(find_tensors(output))
    own = exchange.range_of(length)[1]
    if len(tensors) != len(dims) or any(
        dim is not None and (dim >= value.dim() or value.shape[dim] != own)
        for value, dim in zip(tensors, dims, strict=False)
    ):
        raise MisuseError(OTHER_CALLS)
    found = iter(dims)

    def join(tensor: Tensor) -> Tensor:
        dim = next(found)
        return tensor if dim is None else exchange.join(tensor, dim, length)

    return map_tensors(join, output)


def length_of(plan: BlockPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the length of the whole sequence in the arguments of a block."""
    sequence = chain_input(args, kwargs)
    assert sequence is not None, "the plan was made for one"
    return sequence.shape[plan.dim]


@contextmanager
def _whole_part(block: nn.Module, name: str, shard: SequenceShard) -> Iterator[None]:
    """Compute a module inside of a block for whole sequences: its inputs are gathered, its outputs sharded."""
    if not name:
        yield
        return
    part = submodule_at(block, name)
    before = vars(part).get("forward")
    forward: Callable[..., Any] = part.forward

    def compute(*args: Any, **kwargs: Any) -> Any:
        gathered: dict[int, Tensor] = {}

        def gather(tensor: Tensor) -> Tensor:
            if tensor.dim() < 3 or tensor.shape[shard.dim] != shard.own_length or not tensor.is_floating_point():
                return tensor
            if id(tensor) not in gathered:
                gathered[id(tensor)] = shard.exchange.gather(tensor, shard.dim, shard.length)
            return gathered[id(tensor)]

        with shard.suspended():
            output = forward(*map_tensors(gather, list(args)), **map_tensors(gather, kwargs))
        return map_tensors(
            lambda tensor: (
                shard.exchange.narrow(tensor, shard.dim)
                if tensor.dim() >= 3 and tensor.shape[shard.dim] == shard.length
                else tensor
            ),
            output,
        )

    vars(part)["forward"] = compute
    try:
        yield
    finally:
        if before is None:
            del vars(part)["forward"]
        else:
            vars(part)["forward"] = before


# --- the trial ---


def plan_block(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], size: int) -> BlockPlan:
    """Return the plan by which a call of a block is computed in ``size`` shards.

    Raises `TrialFailed` if there is none. Copies of ``block`` are called with few rows and short sequences, whatever
    the sizes of the arguments are.
    """
    sequence = chain_input(args, kwargs)
    if sequence is None or not sequence.is_floating_point() or sequence.dim() < 3:
        raise TrialFailed("its first input is not a sequence of vectors, a tensor of floats with 3 dims")
    unknown = next((leaf for leaf in find_leaves([list(args), dict(kwargs)]) if not _can_be_sharded(leaf)), None)
    if unknown is not None:
        raise TrialFailed(f"it takes a {type(unknown).__name__}")
    reasons: list[str] = []
    states = rng.capture(torch.device("cpu"))
    try:
        with replaced_functions(), redirect_stdout(io.StringIO()), torch.autocast("cpu", enabled=False):
            try:
                block = random_copy(block, torch.float64)
            except Exception as error:
                raise TrialFailed(f"it cannot be copied: {type(error).__name__}: {error}") from None
            for dim in dims_to_shard(sequence, size):
                try:
                    return _Trial(block, dim, args, kwargs, size).find_plan()
                except TrialFailed as failed:
                    reasons.append(str(failed))
    finally:
        rng.restore(states, torch.device("cpu"))
    raise TrialFailed(reasons[0] if reasons else "its sequences are too short")


def dims_to_shard(sequence: Tensor, size: int) -> list[int]:
    """Return the dims along which an input may have a sequence that is long enough for ``size`` shards."""
    return [dim for dim in (1, 0) if dim < sequence.dim() and sequence.shape[dim] >= MIN_SHARD * size]


class _Trial:
    """Trials of a block whose input has the sequence along ``dim``."""

    def __init__(self, block: nn.Module, dim: int, args: Sequence[Any], kwargs: Mapping[str, Any], size: int) -> None:
        self._block = block
        self._dim = dim
        self._size = size
        sequence = chain_input(args, kwargs)
        assert sequence is not None, "checked before"
        length, rows = sequence.shape[dim], sequence.shape[1 - dim]
        tensors = list(find_tensors([list(args), dict(kwargs)]))
        others = {number for value in tensors for number in value.shape} - {length}
        others |= {number for value in block.parameters() for number in value.shape}
        self._dims = [(dim,) if value is sequence else _dims_of(value, length, rows, dim) for value in tensors]
        # Where a width equals the length, it is not known which dims to shorten.
        is_clear = length not in sequence.shape[2:] and not any(
            len(own) > 1 and value.dim() == 3 for own, value in zip(self._dims, tensors, strict=True)
        )
        self._length = next((n for n in _LENGTHS if MIN_SHARD * size <= n < length and n not in others), length)
        self._length = self._length if is_clear else length
        self._args, self._kwargs = self._shorten(args, kwargs, rows, min(rows, _ROWS))

    def _shorten(self, args: Any, kwargs: Any, rows: int, short: int) -> tuple[Any, Any]:
        """Return arguments in float64 on the CPU, with few rows and a short sequence, and a random first input."""
        generator = torch.Generator().manual_seed(_SEED)
        dims = iter(self._dims)
        first = chain_input(args, kwargs)

        def convert(tensor: Tensor) -> Tensor:
            own = next(dims)
            value = tensor.detach().cpu()
            for dim in own:
                value = value.narrow(dim, 0, self._length)
            batch = 1 - self._dim if tensor is first else 0
            if value.dim() > 1 and batch not in own and value.shape[batch] == rows:
                value = value.narrow(batch, 0, short)
            if not value.is_floating_point():
                return value.clone()
            value = (
                torch.randn(value.shape, generator=generator, dtype=torch.float64, device="cpu")
                if tensor is first
                else value
            )
            return value.to(torch.float64).clone().requires_grad_(tensor is first or tensor.requires_grad)

        return map_tensors(convert, (list(args), dict(kwargs)))

    def find_plan(self) -> BlockPlan:
        """Return the first plan with which shards give the same outputs and gradients as the whole sequence."""
        states = torch.get_rng_state()
        try:
            kinds, expected = self._compute_whole()
        except Exception as error:
            raise TrialFailed(f"it cannot be tried: {type(error).__name__}: {error}") from None
        if not torch.equal(states, torch.get_rng_state()):
            raise TrialFailed("it draws random numbers by other functions than dropout")
        reasons: list[str] = []
        for part in ("", *self._parts()):
            for arguments in self._choices_of_arguments():
                plan = BlockPlan(self._dim, arguments, (), () if part else kinds, part)
                try:
                    return self._compare(plan, expected)
                except TrialFailed as failed:
                    reasons.append(str(failed))
        raise TrialFailed(reasons[0])

    def _choices_of_arguments(self) -> list[tuple[int | None, ...]]:
        """Return candidates for the sharded dims: for all arguments as long as the sequence, or the first only."""
        sequence = chain_input(self._args, self._kwargs)
        is_first = [value is sequence for value in self._tensors(self._args, self._kwargs)]
        clear = tuple(own[0] if len(own) == 1 else None for own in self._dims)
        along = tuple(self._dim if self._dim in own else own[0] if len(own) == 1 else None for own in self._dims)
        alone = tuple(self._dim if first else None for first in is_first)
        return list(dict.fromkeys((clear, along, alone)))

    def _tensors(self, args: Any, kwargs: Any) -> list[Tensor]:
        return list(find_tensors([list(args), dict(kwargs)]))

    def _parts(self) -> list[str]:
        """Return the modules inside of the block that each rank may compute for whole sequences."""
        if not all(self._dims):  # an argument of another length could be mistaken for a shard
            return []
        named = [name for name, part in self._block.named_children() if any(True for _ in part.parameters())]
        return sorted(named, key=lambda name: "att" not in name.lower())[:_MAX_PARTS]

    def _compute_whole(self) -> tuple[tuple[AttentionKind, ...], _Outcome]:
        shard = whole_sequence(self._length, self._dim, _masks())
        with shard.computing():
            block = copy.deepcopy(self._block)
            outcome = self._run(block, block)
        return tuple(shard.found), outcome

    def _run(self, block: nn.Module, call: Callable[..., Any]) -> _Outcome:
        args, kwargs = map_tensors(_leaf, (self._args, self._kwargs))
        with torch.enable_grad():
            outputs = list(find_tensors(call(*args, **kwargs)))
            generator = torch.Generator().manual_seed(_SEED)
            total = torch.zeros((), dtype=torch.float64, device="cpu")
            for value in outputs:
                if value.requires_grad:
                    total = (
                        total
                        + (value * torch.randn(value.shape, generator=generator, dtype=value.dtype, device="cpu")).sum()
                    )
            inputs = [value for value in self._tensors(args, kwargs) if value.requires_grad]
            weights = [value for value in block.parameters() if value.requires_grad]
            # `torch.autograd.grad` and `Tensor.backward` are replaced in plain cells.
            torch.autograd.backward(total, inputs=[*inputs, *weights])
        gradients = [torch.zeros_like(value) if value.grad is None else value.grad for value in (*inputs, *weights)]
        return _Outcome([value.detach() for value in outputs], gradients[: len(inputs)], gradients[len(inputs) :])

    def _compare(self, plan: BlockPlan, expected: _Outcome) -> BlockPlan:
        """Return the plan with the dims of its outputs; raises `TrialFailed` if results of shards differ."""

        def compute(index: int, comm: ThreadCommunicator) -> tuple[BlockPlan, _Outcome]:
            exchange = SequenceExchange(comm, index, self._size)
            block = copy.deepcopy(self._block)
            dims: list[int | None] = []

            def call(*args: Any, **kwargs: Any) -> Any:
                output = compute_shard(block, block, plan, exchange, args, kwargs, _masks())
                own = exchange.range_of(self._length)[1]
                tensors = list(find_tensors(output))
                if len(tensors) != len(expected.outputs):
                    raise TrialFailed(_OTHER_OUTPUTS)
                dims.extend(_shard_dim(value, one, own) for value, one in zip(tensors, expected.outputs, strict=True))
                return join_shards(output, dims, exchange, self._length)

            outcome = self._run(block, call)
            return replace(plan, outputs=tuple(dims)), outcome

        try:
            results = run_threads(self._size, compute)
        except Exception as error:
            raise TrialFailed(f"a part of the sequence raises {type(error).__name__}: {error}") from None
        plans = {made for made, _ in results}
        pairs = [
            pair
            for _, found in results
            for pair in zip([*found.outputs, *found.inputs], [*expected.outputs, *expected.inputs], strict=True)
        ]
        pairs += [
            (torch.stack([found.weights[number] for _, found in results]).mean(0), whole)
            for number, whole in enumerate(expected.weights)
        ]
        if not all(is_close(result, reference, _TOLERANCE) for result, reference in pairs):
            raise TrialFailed("a part of the sequence gives other results than the whole")
        if len(plans) > 1:
            raise TrialFailed(_OTHER_OUTPUTS)
        return plans.pop()


@dataclass
class _Outcome:
    """The outputs of a block, and the gradients of a random linear function of them."""

    outputs: list[Tensor]
    inputs: list[Tensor]
    weights: list[Tensor]


def _can_be_sharded(leaf: Any) -> bool:
    """Return whether an argument is a tensor, or a plain value, which all shards receive unchanged."""
    return leaf is None or isinstance(leaf, Tensor | bool | int | float | str)


def _dims_of(value: Tensor, length: int, rows: int, dim: int) -> tuple[int, ...]:
    """Return the dims of a tensor that have the length of the sequence.

    If the number of rows equals the length, the first dim counts as the rows, unless it is ``dim``.
    """
    found = tuple(number for number, size in enumerate(value.shape) if size == length)
    return tuple(number for number in found if number == dim or value.dim() < 2 or number) if rows == length else found


def _leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


def _shard_dim(value: Tensor, expected: Tensor, own: int) -> int | None:
    """Return the dim along which an output is a shard of the ``expected`` one; None if it is whole."""
    if value.shape == expected.shape:
        return None
    differs = [dim for dim, (size, whole) in enumerate(zip(value.shape, expected.shape, strict=False)) if size != whole]
    if value.dim() != expected.dim() or len(differs) != 1 or value.shape[differs[0]] != own:
        raise TrialFailed(_OTHER_OUTPUTS)
    return differs[0]


def _masks() -> MakeMask:
    """Return a function that draws dropout masks from its own generator."""
    generator = torch.Generator().manual_seed(_SEED)

    def make(shape: tuple[int, ...], p: float, like: Tensor) -> Tensor:
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        return (drawn >= p).to(like.dtype) / (1 - p if p < 1 else 1)

    return make
