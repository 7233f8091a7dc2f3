"""Training steps of a model in stages by the schedules of `torch.distributed.pipelining`.

A schedule determines the order of the forward and backward passes of micro-batches: 1F1B keeps the activations of fewer
micro-batches than GPipe, interleaved and zero-bubble schedules wait less. It needs the loss function, since it computes
the backward pass of one micro-batch before the forward passes of others. Sources: https://arxiv.org/abs/2104.04473
(1F1B, interleaved), https://arxiv.org/abs/2401.10241 (zero bubble).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.pipeline_stages import why_no_stages
from accel_nb.runtime.distributed.stage_exchange import TensorSpec
from accel_nb.runtime.tensors.nested import find_tensors, map_tensors
from accel_nb.strategies.base import ScheduledLoss
from accel_nb.strategies.pipeline.pipeline import ModelCall, Pipeline, is_close, join, rows_of
from accel_nb.strategies.pipeline.stage_run import Stage

ScheduleName = Literal["gpipe", "1f1b", "zero_bubble"]
"""The names of schedules; with several stages on each rank these are the interleaved ones."""

_SCHEDULES: dict[tuple[str, bool], Any] = {
    ("gpipe", False): ScheduleGPipe,
    ("gpipe", True): ScheduleLoopedBFS,
    ("1f1b", False): Schedule1F1B,
    ("1f1b", True): ScheduleInterleaved1F1B,
    ("zero_bubble", False): ScheduleInterleavedZeroBubble,
    ("zero_bubble", True): ScheduleInterleavedZeroBubble,
}
_MAX_SHAPES = 8
_LOSS_DTYPE = torch.float32
"""The dtype in which a schedule gets the loss of a micro-batch."""


@dataclass
class _Step:
    """One training step: the call of the model, and the losses and outputs of micro-batches on the last rank.

    ``size`` is the number of rows of a micro-batch, and ``scale`` the factor of its loss.
    """

    call: ModelCall
    size: int
    target: Any
    scale: float | Tensor
    keeps_outputs: bool
    losses: dict[int, Tensor]
    weights: dict[int, Tensor | None]
    outputs: dict[int, Any]


class TrainingSchedule:
    """Trains a model in stages by a schedule. All ranks of a replica of the model must make the same calls.

    ``loss_fn`` takes the model's output, and the target if there is one; ``loss_weight(loss, num_rows)`` returns the
    total weight of a loss, or None if that is the number of rows. ``cast`` converts the model's output as its forward
    does outside of the schedule; ``gathered`` is the context of a step, in which parameters stay gathered.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        name: ScheduleName,
        loss_fn: Callable[..., Tensor],
        loss_weight: Callable[[Tensor, int], Tensor | None],
        *,
        cast: Callable[[Any], Any],
        gathered: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._model, self._pipeline, self._loss_fn, self._loss_weight = model, pipeline, loss_fn, loss_weight
        self._name: ScheduleName = name
        self._cast, self._gathered = cast, gathered
        self._class = _SCHEDULES[name, len(pipeline.stages) > 1]
        self._modules = [_StageModule(self, stage) for stage in pipeline.stages]
        self._built: dict[Any, Any] = {}
        self._num_steps = 0
        self._step: _Step | None = None

    def step(
        self,
        args: Any,
        kwargs: Any,
        target: Any,
        scale: Callable[[], float | Tensor],
        *,
        is_sum: bool,
        holds_on_all_ranks: Callable[[bool], bool],
    ) -> ScheduledLoss | None:
        """Compute the gradients of the loss times ``scale()``, and return the loss of the batch on every rank.

        The loss is the mean over micro-batches, or the sum if ``is_sum``. Returns None, and has computed nothing, for a
        batch that cannot be divided into equal micro-batches on every rank: ranks of one replica that use the schedule
        and of another that do not would call different collectives. ``holds_on_all_ranks`` returns whether a condition
        is true on every rank. Raises `MisuseError` on every rank of a replica if the micro-batches do not give the loss
        of the whole batch: checked by weights in each step, and by value in steps 1, 2, 4, 8 and so on.
        """
        found: ScheduledLoss | None = None

        def compute(call: ModelCall) -> None:
            nonlocal found
            number = self._choose_num_micro_batches(call)
            if holds_on_all_ranks(number is not None):
                assert number is not None, "what holds on all ranks holds on this one"
                _check_target(target, call.num_rows)
                found = self._run(call, number, target, scale(), is_sum)

        self._pipeline.compute_scheduled = compute
        try:
            self._model(*args, **kwargs)
        finally:
            self._pipeline.compute_scheduled = None
        return found

    def compute_stage(self, stage: Stage, index: int, received: Tensor | None) -> Tensor:
        """Compute one stage with one micro-batch; return the tensor for the next stage, or the scaled loss."""
        step = self._step
        assert step is not None, "stages are computed inside of a step"
        call, start = step.call, index * step.size

        def receive() -> Tensor:
            assert received is not None, "a stage that is not the first receives a tensor"
            return _ContiguousGradient.apply(received)

        args, kwargs, target = rows_of((call.args, call.kwargs, step.target), call.num_rows, start, step.size)
        output = self._pipeline.run_stage(stage, receive, args, kwargs)
        if stage.next_rank is not None:
            # Stages send contiguous tensors, and zero bubble detaches them in place, which no view can be.
            return output.clone(memory_format=torch.contiguous_format)
        with torch.autocast(self._pipeline.device.type, enabled=False):
            output = self._cast(output)
            if step.keeps_outputs:
                step.outputs[index] = map_tensors(lambda value: value.detach(), output)
            loss = self._loss_fn(output) if target is None else self._loss_fn(output, target)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise MisuseError("loss_fn must return the loss as a tensor of one value")
            step.losses[index] = loss.detach()
            step.weights[index] = self._loss_weight(loss, step.size)
            # The dtype that `_build` declares, whatever the loss has: PyTorch up to 2.11 raises where they differ. Of
            # this tensor a schedule uses only the gradient, which is 1.
            return (loss * step.scale).reshape(1).to(_LOSS_DTYPE)

    def own_parameters(self, stage: Stage) -> Iterator[nn.Parameter]:
        """Yield the parameters that a stage uses: of its blocks, and all parameters outside of blocks."""
        others = tuple(
            f"{name}." for number, name in enumerate(self._pipeline.plan.blocks) if number not in stage.blocks
        )
        # The model's own method frees gathered parameters.
        for name, value in nn.Module.named_parameters(self._model):
            if value.requires_grad and not name.startswith(others):
                yield value

    def _choose_num_micro_batches(self, call: ModelCall) -> int | None:
        """Return the number of micro-batches: the largest possible that divides the batch; None if there is none."""
        if not call.kind.is_in_micro_batches or any(value.requires_grad for value in call.tensors):
            return None
        number_of_ranks = self._pipeline.exchange.num_ranks
        for number in range(min(self._pipeline.micro_batches, call.num_rows), number_of_ranks - 1, -1):
            rounds = max(1, number // number_of_ranks)
            if call.num_rows % number == 0 and number % rounds == 0:
                return number
        return None

    def _run(self, call: ModelCall, number: int, target: Any, scale: float | Tensor, is_sum: bool) -> ScheduledLoss:
        pipeline = self._pipeline
        self._num_steps += 1
        keeps_outputs = self._num_steps & (self._num_steps - 1) == 0  # steps 1, 2, 4, 8, ...
        step_scale = scale if is_sum else scale / number
        size = call.num_rows // number
        self._step = step = _Step(call, size, target, step_scale, keeps_outputs, {}, {}, {})
        index = torch.arange(number, device="cpu")
        try:
            with self._gathered(), pipeline.own_random_numbers(call.kind), pipeline.collect_scalar_gradients():
                self._schedule_for(call, number, size).step(index=index, target=index)
            return self._loss(step, number, is_sum)
        finally:
            self._step = None

    def _loss(self, step: _Step, number: int, is_sum: bool) -> ScheduledLoss:
        """Return the loss of the batch; raise `MisuseError` on every rank if micro-batches do not determine it."""
        exchange = self._pipeline.exchange
        summary = torch.zeros(3, dtype=torch.float64, device=self._pipeline.device)
        if exchange.is_last:
            losses = [step.losses[index] for index in range(number)]
            loss = torch.stack([value.reshape(()) for value in losses]).sum()
            loss = loss if is_sum else loss / number
            summary[0] = loss
            has_one_weight = is_sum or _are_equal(list(step.weights.values()))
            summary[1] = 0.0 if has_one_weight and self._is_of_whole_batch(step, number, loss) else 1.0
            weight = step.weights[0]
            summary[2] = 1.0 if weight is None else float(weight) / step.size
        exchange.comm.broadcast(summary, exchange.num_ranks - 1)
        if summary[1]:
            what = "the sum" if is_sum else "the mean"
            raise MisuseError(
                f"the loss of a batch is not {what} of the losses of its micro-batches, so a schedule cannot compute "
                "it: for a mean over tokens return their sum in loss_fn and pass weight=number of tokens to step; "
                "otherwise compute the loss of the model's output, and call accelerator.backward(loss)"
            )
        return ScheduledLoss(summary[0], float(summary[2]))

    def _is_of_whole_batch(self, step: _Step, number: int, loss: Tensor) -> bool:
        if not step.keeps_outputs:
            return True
        outputs = [step.outputs[index] for index in range(number)]
        whole = iter(join([list(find_tensors(output)) for output in outputs]))
        output = map_tensors(lambda _: next(whole), outputs[0])
        with torch.no_grad():
            found = self._loss_fn(output) if step.target is None else self._loss_fn(output, step.target)
        return is_close(found.detach().reshape(()), loss.to(found.dtype))

    # --- schedules by shape ---

    def _schedule_for(self, call: ModelCall, number: int, size: int) -> Any:
        key = number, *call.shapes, torch.is_autocast_enabled()
        found = self._built.get(key)
        if found is None:
            if len(self._built) >= _MAX_SHAPES:
                self._built.pop(next(iter(self._built)))
            found = self._built[key] = self._build(call, number, size)
        return found

    def _build(self, call: ModelCall, number: int, size: int) -> Any:
        pipeline = self._pipeline
        problem = why_no_stages(pipeline.exchange.num_ranks, number, dist.get_backend())  # pyright: ignore[reportPrivateImportUsage]
        if problem is not None:
            raise MisuseError(problem)
        specs = pipeline.specs_of_micro_batch(call, size)
        total = len(pipeline.plan.starts)
        stages = [
            PipelineStage(
                module,
                module.stage.number,
                total,
                pipeline.device,
                input_args=() if stage_specs[0] is None else (self._example(stage_specs[0]),),
                output_args=(self._example(stage_specs[1] or ((1,), _LOSS_DTYPE)),),
                group=pipeline.exchange.comm.process_group,
            )
            for module, stage_specs in zip(self._modules, specs, strict=True)
        ]
        is_single = "stage" in inspect.signature(self._class).parameters
        return self._class(
            stages[0] if is_single else stages, number, loss_fn=lambda output, _: output.sum(), scale_grads=False
        )

    def _example(self, spec: TensorSpec) -> Tensor:
        return torch.empty(spec[0], dtype=spec[1], device=self._pipeline.device, requires_grad=True)


class _ContiguousGradient(Function):
    """Returns a tensor whose gradient is contiguous, as stages send it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _check_target(target: Any, num_rows: int) -> None:
    """Raise `MisuseError` if a tensor of the target has another number of rows than the batch."""
    wrong = next((value for value in find_tensors([target]) if value.dim() and len(value) != num_rows), None)
    if wrong is not None:
        raise MisuseError(
            f"target has a tensor of shape {tuple(wrong.shape)}, and the batch has {num_rows} rows, which are cut into "
            "micro-batches: pass a target with one row for each sample, and reshape it in loss_fn"
        )


def _are_equal(weights: Sequence[Tensor | None]) -> bool:
    totals = [float(weight) for weight in weights if weight is not None]
    return len(set(totals)) <= 1


class _StageModule(nn.Module):
    """The module that a schedule calls: one stage of the model, with the number of a micro-batch."""

    def __init__(self, schedule: TrainingSchedule, stage: Stage) -> None:
        super().__init__()
        self._schedule, self.stage = schedule, stage

    def forward(self, received: Tensor | None = None, *, index: Tensor) -> Tensor:
        return self._schedule.compute_stage(self.stage, int(index), received)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the trained parameters of this stage, whose gradients a schedule may compute after the inputs'."""
        return self._schedule.own_parameters(self.stage)
