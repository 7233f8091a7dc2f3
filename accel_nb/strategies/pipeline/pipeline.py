"""The forward and backward passes of one model whose blocks are computed by several ranks, one stage each.

The model's own code runs on every rank. Before the first block of its stage a rank returns the input of a block as its
output; the first own block takes the tensor that the previous stage has sent, and after the last one the forward pass
is ended by an exception. The outputs of the last stage are sent to all ranks, so that the code around the model
computes the same there. A batch passes in several micro-batches, as in GPipe: first all forward, then all backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.distributed.mesh_groups import MeshGroups
from accel_nb.runtime.distributed.stage_exchange import StageExchange, TensorSpec
from accel_nb.runtime.process.user_code import warn_at_user_line
from accel_nb.runtime.tensors.instance_patching import (
    innermost_class,
    patch_instance,
    replace_forward,
    restore_forward,
    unpatch_instance,
)
from accel_nb.runtime.tensors.module_paths import submodule_at
from accel_nb.runtime.tensors.nested import find_leaves, find_tensors, map_tensors
from accel_nb.strategies.block_calls import CallHooks, inside
from accel_nb.strategies.pipeline.chain_probe import ChainProbe, check_chain
from accel_nb.strategies.pipeline.stage_plan import HOOKED, StagePlan
from accel_nb.strategies.pipeline.stage_run import Stage, StageEndedError, StageInput, StageRun
from accel_nb.strategies.pipeline.undone_calls import copy_buffers, have_changed, restoring

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_HALF_TOLERANCE = 5e-2
_RANDOM_BITS = 62


@dataclass
class CallKind:
    """The properties of calls with arguments of one structure, known from earlier calls."""

    output: Any
    """An output of the same structure, with other values."""

    is_in_micro_batches: bool | None = None
    """Whether batches pass in micro-batches; None: no batch had several rows yet."""
    draws_random_numbers: bool | None = None
    """Whether any stage draws random numbers; None before the first call."""
    writes_buffers: bool | None = None
    """Whether any stage writes to buffers; None before the first call."""

    specs: dict[Any, PassSpecs] = field(default_factory=dict)
    """By gradient mode, sizes of micro-batches, shapes of the arguments, and autocast."""


@dataclass
class PassSpecs:
    """Shape and dtype of the tensors that calls of one kind exchange, by stage of this rank and micro-batch."""

    received: dict[tuple[int, int], TensorSpec | None] = field(default_factory=dict)
    sent: dict[tuple[int, int], TensorSpec | None] = field(default_factory=dict)
    outputs: list[tuple[TensorSpec, bool]] = field(default_factory=list)


@dataclass(frozen=True)
class ModelCall:
    """A call of the model with a batch of ``num_rows`` rows."""

    kind: CallKind
    args: Any
    kwargs: Any
    tensors: list[Tensor]
    """The tensors among the arguments."""

    num_rows: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors among the arguments."""
        return tuple(tuple(value.shape) for value in self.tensors)


@dataclass
class _Pass:
    """A forward pass: the tensors received, sent and returned, by stage of this rank and micro-batch."""

    sizes: list[int]
    received: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    sent: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    """Arguments that require a gradient, detached from the graph that computed them."""

    outputs: list[Tensor] = field(default_factory=list)
    needs_gradient: list[bool] = field(default_factory=list)
    is_done: bool = False


class Pipeline:
    """Computes a model in stages; `undo` restores it. All ranks of a replica of the model must make the same calls.

    ``scalars`` are parameters without dimensions, which `fully_shard` does not manage; their gradients are collected in
    ``collected``.
    ``keep_gathered`` sets whether parameters stay gathered after a block's backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: StagePlan,
        groups: MeshGroups,
        device: torch.device,
        *,
        micro_batches: int,
        scalars: Sequence[nn.Parameter],
        keep_gathered: Callable[[bool], object],
    ) -> None:
        self.plan = plan
        self.accepts_backward = False
        """Whether the backward pass that runs was started by the strategy, for all parameters."""
        self._computes_stages = False
        self.collected: dict[int, Tensor] = {}
        self.model = model
        self._kind = innermost_class(model).__name__
        self.exchange = exchange = StageExchange(groups.pp, device)
        self._data_index = groups.mesh.data_index
        self._is_main = groups.mesh.rank == 0
        self.device = device
        self.micro_batches = micro_batches
        self._scalars = scalars
        self._keep_gathered = keep_gathered
        self.stages = [
            Stage(
                number,
                plan.range_of(number),
                (number - 1) % exchange.num_ranks if number else None,
                (number + 1) % exchange.num_ranks if number < len(plan.starts) - 1 else None,
            )
            for number in range(exchange.rank, len(plan.starts), exchange.num_ranks)
        ]
        # Handles the calls of blocks while the model is called.
        self._run: StageRun | ChainProbe | None = None
        self._kinds: dict[Any, CallKind] = {}
        self._forward = model.forward
        # The hooks of a call gather parameters, so `model.forward(x)` is turned into `model(x)`.
        self._is_called = False
        self._call_hook = model.register_forward_pre_hook(self._record_call, prepend=True)
        self._hooks = CallHooks(inside(model), includes_library_hooks=True)
        self._has_cache_option = "use_cache" in inspect.signature(self._forward).parameters
        self._replaced: list[nn.Module] = []
        # Computes a call and its backward pass by a schedule such as 1F1B or zero bubble.
        self.compute_scheduled: Callable[[ModelCall], Any] | None = None
        try:
            for number, name in enumerate(plan.blocks):
                block = submodule_at(model, name)
                patch_instance(block, {"__call__": self._call_of(number, type(block))})
                self._replaced.append(block)
            replace_forward(model, self.forward)
        except BaseException:
            self._call_hook.remove()
            self._restore_blocks()
            raise

    def undo(self) -> None:
        """Restore the model's methods; other replacements since then must be undone already."""
        restore_forward(self.model)
        self._call_hook.remove()
        self._restore_blocks()

    def _restore_blocks(self) -> None:
        for block in reversed(self._replaced):
            unpatch_instance(block)
        self._replaced.clear()

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Copy the buffers of each block from its stage to the others; all ranks of a replica must call.

        Those outside of blocks are copied from the last stage, which alone runs the code after the blocks.
        """
        ranks = {
            id(value): self.plan.rank_of(number)
            for number, name in enumerate(self.plan.blocks)
            for value in submodule_at(self.model, name).buffers()
        }
        for value in self.model.buffers():
            # By `data`, which keeps the version: a call may have saved the buffer for its backward pass.
            self.exchange.comm.broadcast(value.data, ranks.get(id(value), self.exchange.num_ranks - 1))

    def _record_call(self, *_: Any) -> None:
        self._is_called = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model: every rank gets the outputs of the last stage."""
        if not self._is_called and self._run is None:
            return self.model(*args, **kwargs)
        self._is_called = False
        if self._run is not None:
            raise MisuseError(
                f"the forward of {self._kind} calls itself, which stages do not support: train with --pp 1"
            )
        if self._hooks.exist():
            raise MisuseError(HOOKED.format(kind=self._kind))
        if self._has_cache_option:
            if kwargs.get("use_cache"):
                raise MisuseError(
                    f"{self._kind} is called with use_cache, as for generation, which stages do not support: "
                    "call it without --pp"
                )
            kwargs["use_cache"] = False
        tensors = list(find_tensors([list(args), kwargs]))
        num_rows = next((value.shape[0] for value in tensors if value.dim()), 0)
        if not num_rows:
            raise MisuseError(f"{self._kind} is called without a batch, which stages need: train with --pp 1")
        with _disable_current_modes():  # dispatch modes would record that checks read random numbers
            kind = self._kind_of(args, kwargs, tensors, num_rows)
        call = ModelCall(kind, args, kwargs, tensors, num_rows)
        return self._compute(call) if self.compute_scheduled is None else self.compute_scheduled(call)

    def _compute(self, call: ModelCall) -> Any:
        kind, tensors, num_rows = call.kind, call.tensors, call.num_rows
        args, kwargs = call.args, call.kwargs
        has_gradient = torch.is_grad_enabled()
        forward_pass = _Pass(self._sizes(num_rows) if kind.is_in_micro_batches else [num_rows])
        if has_gradient:
            args, kwargs = self._detach_inputs(args, kwargs, forward_pass)
        key = has_gradient, tuple(forward_pass.sizes), *call.shapes, torch.is_autocast_enabled()
        specs = kind.specs.get(key)
        with self.own_random_numbers(kind), self._shared_buffers(kind, len(forward_pass.sizes)):
            results, found = self._compute_parts(args, kwargs, forward_pass, num_rows, specs)
        whole = None if results is None else join(results)
        if specs is None:
            found.outputs = self.exchange.broadcast_specs(whole)
            specs = kind.specs[key] = found
        needs = [needs for _, needs in specs.outputs]
        outputs = self.exchange.broadcast_outputs(
            None if whole is None else [value.detach() for value in whole], [spec for spec, _ in specs.outputs]
        )
        if any(needs):
            forward_pass.outputs, forward_pass.needs_gradient = outputs, needs
            requires_grad_input = torch.empty(0, device=self.device, requires_grad=True)
            sources = [value for value in tensors if value.requires_grad]
            outputs = list(_StageOutputs.apply(self, forward_pass, requires_grad_input, *sources))  # pyright: ignore[reportArgumentType]
        remaining = iter(outputs)
        return map_tensors(lambda _: next(remaining), kind.output)

    def specs_of_micro_batch(self, call: ModelCall, size: int) -> list[tuple[TensorSpec | None, TensorSpec | None]]:
        """Compute the first ``size`` rows of a batch without gradients.

        Return shape and dtype of the tensors that each of this rank's stages receives and sends.
        """
        args, kwargs = rows_of((call.args, call.kwargs), call.num_rows, 0, size)
        states = rng.capture(self.device)
        try:
            with torch.no_grad(), restoring(self.model):
                _, specs = self._compute_parts(args, kwargs, _Pass([size]), size, None)
        finally:
            rng.restore(states, self.device)
        keys = [(stage.number, 0) for stage in self.stages]
        return [(specs.received[key], specs.sent.get(key)) for key in keys]

    def run_stage(self, stage: Stage, receive: Callable[[], Tensor], args: Any, kwargs: Any) -> Any:
        """Compute one stage with one micro-batch; return the tensor for the next stage, or the model's output.

        ``receive`` returns the previous stage's output.
        """
        self._run = StageRun(stage, receive)
        try:
            return self._forward(*args, **kwargs)
        except StageEndedError as end:
            return end.output
        finally:
            self._run = None

    # --- kinds of calls ---

    def _kind_of(self, args: Any, kwargs: Any, tensors: Sequence[Tensor], num_rows: int) -> CallKind:
        key = (
            self.model.training,
            len(args),
            tuple(kwargs),
            tuple((value.dim(), value.dtype, bool(value.dim()) and len(value) == num_rows) for value in tensors),
            tuple(
                leaf if leaf is None or isinstance(leaf, bool | int | float | str) else type(leaf)
                for leaf in find_leaves([list(args), kwargs])
                if not isinstance(leaf, Tensor)
            ),
        )
        kind = self._kinds.get(key)
        if kind is None:
            kind = CallKind(torch.empty(0, device="cpu") if self.plan.is_whole else self._check_chain(args, kwargs))
            self._kinds[key] = kind
        if kind.is_in_micro_batches is None and min(self.micro_batches, num_rows) > 1:
            kind.is_in_micro_batches = self._is_equal_in_parts(args, kwargs, num_rows)
            if not kind.is_in_micro_batches and self._is_main:
                warn_at_user_line(_WHOLE.format(kind=self._kind))
        return kind

    def _check_chain(self, args: Any, kwargs: Any) -> Any:
        def run(probe: ChainProbe) -> Any:
            self._run = probe
            try:
                return self._forward(*args, **kwargs)
            finally:
                self._run = None

        with restoring(self.model):
            return check_chain(self._kind, len(self.plan.blocks), self.device, run)

    def _is_equal_in_parts(self, args: Any, kwargs: Any, num_rows: int) -> bool:
        """Compute a batch whole and in micro-batches, and return whether the outputs are equal.

        Where random numbers are drawn in training, as for dropout, the outputs in evaluation are compared.
        """
        if self.model.training:
            is_equal, draws_random_numbers = self._compare_parts(args, kwargs, num_rows)
            if not draws_random_numbers:
                return is_equal
        with restoring(self.model):
            for part in self.model.modules():
                part.training = False
            return self._compare_parts(args, kwargs, num_rows)[0]

    def _compare_parts(self, args: Any, kwargs: Any, num_rows: int) -> tuple[bool, bool]:
        """Return whether outputs of a batch whole and in micro-batches are equal, and whether any stage draws."""
        states = rng.capture(self.device)
        try:
            with torch.no_grad(), restoring(self.model):
                (whole, _), (parts, _) = (
                    self._compute_parts(args, kwargs, _Pass(sizes), num_rows, None, catches_errors=True)
                    for sizes in ([num_rows], self._sizes(num_rows))
                )
            now = rng.capture(self.device)
        finally:
            rng.restore(states, self.device)
        is_equal = False
        if whole is not None and parts is not None:
            is_equal = all(
                len(tensors) == len(whole[0]) and all(value.dim() and len(value) == size for value in tensors)
                for tensors, size in zip(parts, self._sizes(num_rows), strict=True)
            ) and all(map(is_close, whole[0], join(parts)))
        draws_random_numbers = self.exchange.any(any(not torch.equal(now[name], states[name]) for name in states))
        return self.exchange.broadcast_value(is_equal), draws_random_numbers

    @contextmanager
    def _shared_buffers(self, kind: CallKind, num_parts: int) -> Iterator[None]:
        """Share buffers that stages have written to in the block, so that all ranks have them."""
        before = copy_buffers(self.model) if kind.writes_buffers is None else []
        yield
        if kind.writes_buffers is None:
            kind.writes_buffers = self.exchange.any(have_changed(self.model, before))
            if kind.writes_buffers and num_parts > 1 and self._is_main:
                warn_at_user_line(_WRITTEN_BUFFERS.format(kind=self._kind, number=num_parts))
        if kind.writes_buffers:
            self.share_buffers()

    @contextmanager
    def own_random_numbers(self, kind: CallKind) -> Iterator[None]:
        """Draw random numbers in the block with a separate seed for each stage; outside generators stay equal."""
        if kind.draws_random_numbers is False:
            yield
            return
        before = rng.capture(self.device, parts=("torch",))
        with _disable_current_modes():
            seed = int(torch.randint(2**_RANDOM_BITS, (), device="cpu"))
        after = rng.capture(self.device, parts=("torch",))
        torch.manual_seed(rng.derive_seed(seed, "stage", self.exchange.rank, "data", self._data_index))
        start = rng.capture(self.device, parts=("torch",))
        try:
            yield
            if kind.draws_random_numbers is None:
                now = rng.capture(self.device, parts=("torch",))
                kind.draws_random_numbers = self.exchange.any(
                    any(not torch.equal(now[name], start[name]) for name in start)
                )
        finally:
            rng.restore(before if kind.draws_random_numbers is False else after, self.device)

    # --- forward ---

    def _sizes(self, num_rows: int) -> list[int]:
        number = min(self.micro_batches, num_rows)
        return [num_rows // number + (index < num_rows % number) for index in range(number)]

    def _detach_inputs(self, args: Any, kwargs: Any, forward_pass: _Pass) -> tuple[Any, Any]:
        def detach(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            forward_pass.inputs.append(tensor.detach().requires_grad_())
            return forward_pass.inputs[-1]

        return map_tensors(detach, (list(args), dict(kwargs)))

    def _compute_parts(
        self,
        args: Any,
        kwargs: Any,
        forward_pass: _Pass,
        num_rows: int,
        specs: PassSpecs | None,
        *,
        catches_errors: bool = False,
    ) -> tuple[list[list[Tensor]] | None, PassSpecs]:
        """Compute this rank's stages for all micro-batches.

        Return the outputs on the last rank, None on the others, and shape and dtype of the exchanged tensors. If
        ``catches_errors``, there are no outputs after an error of any stage; else it is raised.
        """
        exchange, has_failed = self.exchange, False
        found, waits = PassSpecs(), []
        for stage in self.stages:
            start = 0
            for index, size in enumerate(forward_pass.sizes):
                key = stage.number, index
                own_args, own_kwargs = rows_of((args, kwargs), num_rows, start, size)
                start += size
                stage_input = StageInput(exchange, stage.previous_rank, None if specs is None else specs.received[key])
                tensors: list[Tensor] = []
                try:
                    tensors = list(find_tensors(self.run_stage(stage, stage_input.receive, own_args, own_kwargs)))
                except Exception:
                    if not catches_errors:
                        raise
                    stage_input.receive_unread()
                    has_failed = True
                forward_pass.received[key] = stage_input.tensor
                forward_pass.sent[key] = tensors
                found.received[key] = stage_input.spec
                if stage.next_rank is None:
                    continue
                output = tensors[0] if tensors else None
                spec = None if output is None else (tuple(output.shape), output.dtype)
                if specs is None:
                    waits.append(exchange.send_spec(output, stage.next_rank))
                    found.sent[key] = spec
                elif output is None or specs.sent[key] != spec:
                    raise MisuseError(f"a block of {self._kind} returned a tensor of another shape: train with --pp 1")
                if output is not None:
                    waits.append(exchange.send(output, stage.next_rank))
        for wait in waits:
            wait()
        if has_failed or not exchange.is_last:
            return None, found
        return [forward_pass.sent[self.stages[-1].number, index] for index in range(len(forward_pass.sizes))], found

    def _call_of(self, number: int, base: Any) -> Callable[..., Any]:
        def __call__(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None:
                raise MisuseError(
                    f"a block of {self._kind} was called outside of the model's forward, and other workers hold other "
                    "blocks: call the model, or train with --pp 1"
                )
            return run.call(number, lambda *args, **kwargs: base.__call__(block, *args, **kwargs), args, kwargs)

        return __call__

    # --- backward ---

    @property
    def is_backward_outside_model(self) -> bool:
        """Whether a backward pass runs through code around the model's forward, which is the same on every rank."""
        return self.accepts_backward and not self._computes_stages

    def divide_outside_gradient(self, gradient: Tensor) -> Tensor:
        """Divide a gradient by the number of ranks if it comes from code outside of the model.

        Every rank computes such code, and the ranks' gradients are summed later. Other gradients are unchanged.
        """
        return gradient / self.exchange.num_ranks if self.is_backward_outside_model else gradient

    @contextmanager
    def collect_scalar_gradients(self) -> Iterator[None]:
        """Move the gradients of scalars that backward passes in the with statement compute into ``collected``."""
        before = [(value, value.grad) for value in self._scalars]
        for value in self._scalars:
            value.grad = None
        yield
        for value, gradient in before:
            if value.grad is not None:
                earlier = self.collected.get(id(value))
                self.collected[id(value)] = value.grad if earlier is None else earlier + value.grad
            value.grad = gradient

    @contextmanager
    def _computing_stages(self) -> Iterator[None]:
        self._computes_stages = True
        try:
            yield
        finally:
            self._computes_stages = False

    def compute_gradients(self, forward_pass: _Pass, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Compute the gradients of this rank's stage, and return the gradients of the model's arguments."""
        if not self.accepts_backward:
            raise MisuseError(
                f"the gradients of {self._kind} are computed by stages, for all parameters at once: call "
                "loss.backward() in a plain cell, or accelerator.backward(loss), or train with --pp 1"
            )
        if forward_pass.is_done:
            raise MisuseError(
                f"{self._kind} in stages has one backward pass for each call: add the losses, or call the model again"
            )
        forward_pass.is_done = True
        exchange, waits = self.exchange, []
        self._keep_gathered(True)
        with self._computing_stages(), self.collect_scalar_gradients():
            for stage in reversed(self.stages):
                start = 0
                for index, size in enumerate(forward_pass.sizes):
                    computed = forward_pass.sent.pop((stage.number, index))
                    received = forward_pass.received.pop((stage.number, index))
                    own: list[Tensor | None]
                    if stage.next_rank is None:
                        is_whole = len(forward_pass.sizes) == 1
                        own = [
                            value if is_whole or value is None else value.narrow(0, start, size) for value in gradients
                        ]
                    else:
                        own = [exchange.receive((tuple(computed[0].shape), computed[0].dtype), stage.next_rank)]
                    start += size
                    pairs = [
                        (value, gradient)
                        for value, gradient in zip(computed, own, strict=True)
                        if gradient is not None and value.requires_grad
                    ]
                    if stage is self.stages[0] and index == len(forward_pass.sizes) - 1:
                        self._keep_gathered(False)
                    if pairs:
                        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
                    if received is not None and stage.previous_rank is not None:
                        sent = torch.zeros_like(received) if received.grad is None else received.grad
                        waits.append((exchange.send(sent, stage.previous_rank), sent))
            for wait, _ in waits:
                wait()
        found = [torch.zeros_like(value) if value.grad is None else value.grad for value in forward_pass.inputs]
        return [exchange.comm.all_reduce(value.contiguous()) for value in found]


class _StageOutputs(Function):
    """Returns the outputs of the last stage; its backward pass computes the gradients of this rank's stages."""

    @staticmethod
    def forward(
        ctx: Any, pipeline: Pipeline, forward_pass: _Pass, requires_grad_input: Tensor, *sources: Tensor
    ) -> Any:
        ctx.call = pipeline, forward_pass
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(
                value
                for value, needs in zip(forward_pass.outputs, forward_pass.needs_gradient, strict=True)
                if not needs
            )
        )
        outputs, forward_pass.outputs = tuple(forward_pass.outputs), []
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        pipeline, forward_pass = ctx.call
        return None, None, None, *pipeline.compute_gradients(forward_pass, gradients)


def rows_of(value: Any, num_rows: int, start: int, length: int) -> Any:
    """Return a nested value with rows from ``start`` on of each tensor that has all rows of a batch."""

    def select(tensor: Tensor) -> Tensor:
        is_whole = length == num_rows or not tensor.dim() or len(tensor) != num_rows
        return tensor if is_whole else tensor.narrow(0, start, length)

    return map_tensors(select, value)


def join(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the tensors of a batch, joined from the tensors of its micro-batches."""
    if len(parts) == 1:
        return list(parts[0])
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    allowed = _TOLERANCE.get(one.dtype, _HALF_TOLERANCE)
    scale = float(torch.nan_to_num(one.abs(), posinf=0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=allowed, atol=allowed * scale, equal_nan=True)


_WRITTEN_BUFFERS = (
    "{kind} writes to buffers in its forward pass, which stages compute for {number} micro-batches, one after the "
    "other: on one device each batch writes once. Set mesh.micro_batches to 1 if that matters"
)
_WHOLE = (
    "{kind}, or its loss, computes with several samples of a batch together: each batch passes through the stages as a "
    "whole, and stages wait for each other. Layers that treat each sample by itself avoid that"
)
