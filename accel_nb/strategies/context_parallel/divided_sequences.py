"""Models whose blocks compute shards of sequences, one shard on each rank.

Code outside of the blocks computes whole sequences on every rank: positions, embeddings, output layers and losses are
the same as on one device. Each block takes this rank's shard of its input, and returns the whole output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.sequence_exchange import SequenceExchange
from accel_nb.runtime.process.user_code import warn_at_user_line
from accel_nb.runtime.tensors.instance_patching import innermost_class, replace_forward, restore_forward
from accel_nb.runtime.tensors.module_paths import submodule_at
from accel_nb.runtime.tensors.nested import find_leaves, find_tensors
from accel_nb.strategies.base import Refusal
from accel_nb.strategies.block_calls import LATE_HOOK, CallHooks, chain_input, inside
from accel_nb.strategies.context_parallel.block_plan import (
    BlockPlan,
    compute_shard,
    dims_to_shard,
    join_shards,
    length_of,
    plan_block,
)
from accel_nb.strategies.context_parallel.sharded_functions import replaced_functions
from accel_nb.strategies.module_kinds import kind_of
from accel_nb.strategies.trials import TrialFailed, copy_without_hooks, run_threads


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return by name the modules that may compute shards: the outermost ones in lists, else the model's own parts."""
    listed: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and not any(
            f"{name}.".startswith(f"{one}.") for one in listed
        ):
            inner = {leaf: child for leaf, child in part.named_children() if any(True for _ in child.children())}
            listed |= {f"{name}.{leaf}" if name else leaf: child for leaf, child in inner.items()}
    return listed or {leaf: child for leaf, child in model.named_children() if any(True for _ in child.children())}


def refuse_blocks(model: nn.Module, size: int) -> Refusal | None:
    """Return the reason if, by the model's structure, no block can compute shards; None if some may."""
    if find_blocks(model):
        return None
    return Refusal(
        f"mesh.cp {size} needs blocks of layers to which sequences are given, and {innermost_class(model).__name__} "
        "has none",
        "train with --cp 1",
    )


@dataclass
class BlockCopies:
    """Copies of a model's blocks for trials, made before its parameters are divided: one for each kind of block."""

    kinds: dict[str, Any] = field(default_factory=dict)
    """By name of a block, a key that is equal for blocks with the same computation."""
    copies: dict[Any, nn.Module] = field(default_factory=dict)
    not_divided: dict[str, str] = field(default_factory=dict)
    """By class of block, the reason why it is not computed in shards."""

    @classmethod
    def of(cls, model: nn.Module) -> BlockCopies:
        """Copy the blocks of a model to the CPU."""
        found = cls()
        for name, block in find_blocks(model).items():
            if CallHooks(inside(block), includes_library_hooks=True).exist():
                found.not_divided[innermost_class(block).__name__] = "hooks read or change values inside of it"
                continue
            kind = kind_of(block)
            try:
                if kind not in found.copies:
                    found.copies[kind] = copy_without_hooks(block)
            except Exception as error:
                why = f"it cannot be copied: {type(error).__name__}: {error}"
                found.not_divided[innermost_class(block).__name__] = why
                continue
            found.kinds[name] = kind
        return found


class SequenceDivision:
    """Replaced forwards of a model and of its blocks; `undo` restores them.

    The first call of a kind of block with arguments of some structure makes a trial. A block without a successful trial
    is computed whole on every rank; if no block has one, the first call of the model that computes gradients raises.
    """

    def __init__(
        self, model: nn.Module, exchange: SequenceExchange, blocks: BlockCopies, *, is_main: bool = False
    ) -> None:
        self._kind = innermost_class(model).__name__
        self._exchange = exchange
        self._is_whole_call = False
        # Whether a block is being computed: blocks that it calls are parts of it.
        self._is_inside = False
        # Whether any block was computed in shards.
        self._has_sharded = False
        self._copies = blocks.copies
        self._not_divided = blocks.not_divided
        # By kind of block and structure of arguments; None: such calls are computed whole.
        self._plans: dict[Any, BlockPlan | None] = {}
        self._parts: set[str] = set()
        self._is_main = is_main
        self._reported: set[str] = set()
        self._replaced: list[nn.Module] = []
        try:
            for name, kind in blocks.kinds.items():
                block = submodule_at(model, name)
                self._replace(block, self._forward_of(block, kind))
            self._forward = model.forward
            self._has_cache = "use_cache" in inspect.signature(self._forward).parameters
            self._replace(model, self._call)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the forwards; other replacements since then must be undone already."""
        for module in reversed(self._replaced):
            restore_forward(module)
        self._replaced.clear()

    def describe(self) -> dict[str, str]:
        """Return the modules that are not computed in shards, with the reason as text; empty before the first call."""
        description = dict.fromkeys(sorted(self._parts), "computed whole on each worker")
        return description | {f"{kind} computed whole:": why for kind, why in self._not_divided.items()}

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        replace_forward(module, forward)
        self._replaced.append(module)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model; with a key-value cache, as for generation, every rank computes all of it."""
        before = self._is_whole_call
        if self._has_cache:
            self._is_whole_call = bool(kwargs.setdefault("use_cache", False))
        try:
            output = self._forward(*args, **kwargs)
        finally:
            self._is_whole_call = before
        if not self._has_sharded and torch.is_grad_enabled() and any(v.requires_grad for v in find_tensors(output)):
            reasons = "; ".join(f"{kind}: {why}" for kind, why in self._not_divided.items())
            raise MisuseError(
                f"mesh.cp {self._exchange.size} can divide no block of {self._kind}"
                f" ({reasons or 'none was called with a sequence'}): {_REMEDY}"
            )
        self._warn_about_whole()
        return output

    def _warn_about_whole(self) -> None:
        """Warn about modules that are not computed in shards, once for each, on rank 0."""
        description = self.describe()
        if self._is_main and not description.keys() <= self._reported:
            new = [f"{name} {why}" for name, why in description.items() if name not in self._reported]
            warn_at_user_line(f"with mesh.cp {self._exchange.size}, {'; '.join(new)}")
        self._reported |= description.keys()

    def _forward_of(self, block: nn.Module, kind: Any) -> Callable[..., Any]:
        forward, hooks = block.forward, CallHooks(inside(block))

        def compute(*args: Any, **kwargs: Any) -> Any:
            is_part = self._is_whole_call or self._is_inside
            plan = None if is_part else self._plan_of(block, kind, args, kwargs)
            if plan is None:
                return forward(*args, **kwargs)
            if hooks.exist():
                raise MisuseError(LATE_HOOK.format(kind=innermost_class(block).__name__, option="cp"))
            self._is_inside = True
            try:
                with replaced_functions():
                    output = compute_shard(block, forward, plan, self._exchange, args, kwargs)
            finally:
                self._is_inside = False
            return join_shards(output, plan.outputs, self._exchange, length_of(plan, args, kwargs))

        return compute

    def _plan_of(self, block: nn.Module, kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BlockPlan | None:
        sequence = chain_input(args, kwargs)
        if sequence is None or not sequence.numel():
            return None
        key = kind, block.training, _structure(args, kwargs, dims_to_shard(sequence, self._exchange.size))
        if key not in self._plans:
            self._plans[key] = self._try(block, kind, args, kwargs)
        plan = self._plans[key]
        self._has_sharded |= plan is not None
        return plan

    def _try(self, block: nn.Module, kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BlockPlan | None:
        """Return the plan by which a call is computed in shards; None without one. All ranks return the same."""
        name = innermost_class(block).__name__
        copied = self._copies[kind]
        for part, original in zip(copied.modules(), block.modules(), strict=True):
            part.training = original.training
        plan, why = None, "it cannot be tried on another worker"
        try:
            # In another thread: observers of this one, such as modes of torch, would record a model that trains itself.
            [plan] = run_threads(1, lambda *_: plan_block(copied, args, kwargs, self._exchange.size))
        except TrialFailed as failed:
            why = str(failed)
        if not self._exchange.all_set(plan is not None):
            self._not_divided.setdefault(name, why)
            return None
        if plan is not None and plan.part:
            self._parts.add(f"{plan.part} of {name}")
        return plan


def _structure(args: Sequence[Any], kwargs: Mapping[str, Any], dims: list[int]) -> Any:
    """Return a key that is equal for calls with the same plan; it does not contain lengths."""
    sequence = chain_input(args, kwargs)
    assert sequence is not None, "checked before"
    lengths = {sequence.shape[dim]: dim for dim in (0, 1) if dim < sequence.dim()}
    tensors = tuple(
        (value.dtype, value.requires_grad, tuple(lengths.get(size) for size in value.shape))
        for value in find_tensors([list(args), dict(kwargs)])
    )
    others = tuple(
        leaf if leaf is None or isinstance(leaf, bool | int | float | str) else type(leaf)
        for leaf in find_leaves([list(args), dict(kwargs)])
        if not isinstance(leaf, Tensor)
    )
    return tuple(dims), len(args), tuple(kwargs), tensors, others


_REMEDY = (
    "attention must be torch.nn.functional.scaled_dot_product_attention (of transformers, attn_implementation='sdpa'), "
    "and positions must come from outside of the blocks. Train with --cp 1"
)
