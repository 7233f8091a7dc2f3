"""One training run inside an accelerator: backward, clip and step over what was prepared.

Prepared objects refer to this and not to the accelerator, so that a dropped accelerator is really gone and a cell that
builds it anew can take the objects over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.accelerator.accumulate import Window
from accel_nb.accelerator.wrapped import OptimizerGate
from accel_nb.data.loader import Share
from accel_nb.errors import MisuseError, UnsyncedGradientError
from accel_nb.runtime.world import World
from accel_nb.strategies.base import Bundle, Strategy
from accel_nb.telemetry.memory import MemoryMeter
from accel_nb.telemetry.meters import StepMeter

_SUM = 2  # what autograd saves as the reduction of a loss over its elements


class Stepper:
    """Backward passes and optimizer steps; everything here is on the hot path."""

    def __init__(
        self,
        strategy: Strategy,
        world: World,
        *,
        accumulate: int,
        clip: float | None,
        meter: StepMeter,
        memory: MemoryMeter,
    ) -> None:
        self.strategy = strategy
        self.world = world
        self.bundle = Bundle()
        self.window = Window(accumulate, world.size, self._set_sync)
        self.gates: dict[int, OptimizerGate] = {}
        # A loss that is a sum over samples is to count as on one device, not as the mean over workers.
        self.keeps_sums = False
        self.namespace: Mapping[str, Any] = {}
        self.was_skipped = False
        self.is_inside_backward = False
        self._clip = clip
        # Nothing stands between the gate and the optimizer's own step: three calls less.
        self._steps_plainly = not (strategy.capabilities.native_step or strategy.precision.policy.loss_scaling)
        self._meter = meter
        self._memory = memory
        self._known: set[int] = set()
        # What each model had to train when it was prepared: only of that are gradients averaged.
        self._trainable: dict[int, set[int]] = {}
        self._last_share: Share | None = None
        self._last_gate: OptimizerGate | None = None
        self._sum_kinds: dict[type, int] = {}

    def include(self, bundle: Bundle) -> None:
        """Add prepared objects; those that are known already are left out by the caller."""
        self.bundle = self.bundle + bundle
        for model in bundle.models:
            self._trainable[id(model)] = {id(value) for value in model.parameters() if value.requires_grad}
        self._learn_parameters()
        for model in bundle.models:
            self.strategy.grad_sync(model, self.window.closes)

    def exclude(self, objects: Iterable[Any]) -> None:
        """Forget objects."""
        gone = {id(item) for item in objects}
        self.bundle = Bundle(
            tuple(model for model in self.bundle.models if id(model) not in gone),
            tuple(optimizer for optimizer in self.bundle.optimizers if id(optimizer) not in gone),
            tuple(scheduler for scheduler in self.bundle.schedulers if id(scheduler) not in gone),
        )
        self._learn_parameters()

    def set_accumulation(self, size: int) -> None:
        """Change how many micro-batches a window has, from the next one on."""
        self.window.size = size
        for gate in self.gates.values():
            gate.hold_zero_grad(size > 1)

    def backward(self, loss: Tensor, **options: bool) -> None:
        """Compute the gradients of one micro-batch, or of a part of it."""
        window = self.window
        try:
            if not loss.requires_grad:
                raise MisuseError(_NO_GRADIENT)
            if not self.bundle.models and self.world.size > 1:
                raise MisuseError(_NO_MODEL)
        except AttributeError:
            raise MisuseError(
                f"backward takes the loss as a tensor, and got a {type(loss).__name__}; do not call .item() on it"
            ) from None
        share = window.share
        if share is None:
            self._meter.add_loss(loss, 1, 0, is_first=not window.has_backward)
        else:
            samples = share.num_samples
            self._meter.add_loss(loss, samples, samples, is_first=not window.has_backward)
        factor = window.mean_factor
        if self.keeps_sums and share is not None and self._is_sum(loss, share.num_samples):
            factor = window.sum_factor
        if factor != 1.0:
            loss = loss * factor
        window.note_backward()
        self.is_inside_backward = True
        try:
            self.strategy.backward(loss, self.bundle, **options)
        finally:
            self.is_inside_backward = False

    def step(self, gate: OptimizerGate, closure: Callable[[], Any] | None) -> Any:
        """Step an optimizer if the window closes; returns what the closure returned."""
        gate.num_attempts += 1
        if closure is not None:
            return self._step_with_closure(gate, closure)
        window = self.window
        if window.size > 1 and window.has_backward and not window.is_in_block:
            self._refuse_second_backward(gate)
        closes, number, factor = window.attempt() if window.has_backward else window.moment()
        if not closes:
            return None
        if gate.finished_in != number:
            self._finish(gate, number, factor)
        if self._clip is not None:
            self.strategy.clip_grad_norm(gate.bundle, self._clip, 2.0, _parameters(gate.optimizer))
        ran = gate.step_plainly() if self._steps_plainly else gate.run(self.strategy.step) == "ran"
        self._end_step(gate, number, ran)
        return None

    def may_zero(self, gate: OptimizerGate) -> bool:
        """Whether an optimizer may clear its gradients: not those of a window that is not closed."""
        window = self.window
        return window.size == 1 or not window.is_dirty or gate.stepped_in == window.number

    def clip_norm(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients of a closing window; inside of an open one only measure them."""
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        bundle = self.finish(clipped)
        if bundle is None:
            gradients = [parameter.grad for parameter in clipped if parameter.grad is not None]
            return torch.nn.utils.get_total_norm(gradients, norm_type)
        return self.strategy.clip_grad_norm(bundle, max_norm, norm_type, clipped)

    def owns(self, parameters: list[Tensor]) -> bool:
        """Whether any of the parameters belongs to a prepared model."""
        return any(id(parameter) in self._known for parameter in parameters)

    def finish(self, parameters: list[Tensor]) -> Bundle | None:
        """Make the gradients of the optimizers that own ``parameters`` what one process would have.

        Returns these optimizers, or None inside of an open window, where gradients are nobody's business yet.
        """
        closes, number, factor = self.window.moment()
        if not closes:
            return None
        owners = self._owners(parameters)
        for gate in owners:
            if gate.finished_in != number:
                self._finish(gate, number, factor)
        return self._bundle_of(owners)

    def clip_value(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient of a closing window; inside of an open one do nothing."""
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        bundle = self.finish(clipped)
        if bundle is not None:
            for optimizer in bundle.optimizers:
                self.strategy.unscale(optimizer)
            torch.nn.utils.clip_grad.clip_grad_value_(clipped, clip_value)

    @property
    def num_steps(self) -> int:
        """How many optimizer steps were reported."""
        return self._meter.step

    def stepped_models(self) -> list[nn.Module]:
        """Return the models that some optimizer steps: not loss modules, teachers or averaged copies."""
        stepped = {id(value) for optimizer in self.bundle.optimizers for value in _parameters(optimizer)}
        return [model for model in self.bundle.models if any(id(value) in stepped for value in model.parameters())]

    def flush(self) -> None:
        """Report what is still on its way from the device."""
        self._meter.flush()

    @contextmanager
    def without_sync(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Keep gradients of backward passes in the block on this rank."""
        chosen = list(models)
        for model in chosen:
            self.strategy.grad_sync(model, False)
        try:
            yield
        finally:
            for model in chosen:
                self.strategy.grad_sync(model, self.window.closes)

    def _set_sync(self, closes: bool) -> None:
        for model in self.bundle.models:
            self.strategy.grad_sync(model, closes)

    def _step_with_closure(self, gate: OptimizerGate, closure: Callable[[], Any]) -> Any:
        if self.window.size > 1 or self.strategy.precision.policy.loss_scaling:
            raise MisuseError(
                "an optimizer that is stepped with a closure can neither accumulate nor scale losses: "
                "set accumulate to 1 and precision to no or bf16"
            )
        number = self.window.number

        def finished_closure() -> Any:
            nonlocal number
            with torch.enable_grad():
                loss = closure()
            _, number, factor = self.window.attempt()
            self._finish(gate, number, factor)
            if self._clip is not None:
                self.strategy.clip_grad_norm(gate.bundle, self._clip, 2.0, _parameters(gate.optimizer))
            return loss

        # Not through the strategy: its step returns no loss, and there is nothing to scale.
        result = gate.run(lambda optimizer: optimizer.step(), finished_closure)
        self._end_step(gate, number, True)
        return result

    def _finish(self, gate: OptimizerGate, number: int, factor: float) -> None:
        """Make the gradients of an optimizer what one process would have, once for each window."""
        gate.finished_in = number
        if len(gate.optimizer.param_groups) != gate.num_checked:
            self._check_groups(gate)
        if gate.strays:
            self._refuse_strays(gate)
        self.strategy.finish_gradients(gate.bundle, factor)

    def _end_step(self, gate: OptimizerGate, number: int, ran: bool) -> None:
        if ran:
            gate.num_ran += 1
        gate.stepped_in = number
        self.was_skipped = not ran
        now = self._meter.end_step(gate.learning_rate, not ran)
        if now >= self._memory.due:
            self._memory.sample(now, self._meter.step, self.bundle.models, self.bundle.optimizers)

    def _bundle_of(self, gates: list[OptimizerGate]) -> Bundle:
        return Bundle(self.bundle.models, tuple([gate.optimizer for gate in gates]))

    def _owners(self, parameters: list[Tensor]) -> list[OptimizerGate]:
        if len(self.gates) <= 1:
            return list(self.gates.values())
        wanted = set(map(id, parameters))
        return [
            gate
            for gate in self.gates.values()
            if any(id(parameter) in wanted for parameter in _parameters(gate.optimizer))
        ]

    def _is_sum(self, loss: Tensor, num_samples: int) -> bool:
        """Whether the loss is a plain sum over samples, by what autograd knows of its last operation."""
        node: Any = loss.grad_fn
        kind = self._sum_kinds.get(type(node))
        if kind is None:
            kind = 1 if type(node).__name__ == "SumBackward0" else 2 if hasattr(node, "_saved_reduction") else 0
            self._sum_kinds[type(node)] = kind
        if kind == 0:
            return False
        if kind == 2:
            return node._saved_reduction == _SUM
        # A sum of a few losses is no sum over samples: that has one term, or as many, for each sample.
        num_terms = math.prod(node._saved_self_sym_sizes)
        return num_samples > 0 and num_terms % num_samples == 0

    def _learn_parameters(self) -> None:
        self._known = {key for model in self.bundle.models for key in self._trainable[id(model)]}
        for gate in self.gates.values():
            gate.num_checked = -1

    def _refuse_second_backward(self, gate: OptimizerGate) -> None:
        """Two backward passes, each with a step of its own optimizer, are one micro-batch and would count as two."""
        share = self.window.share
        if share is not None and share is self._last_share and gate is not self._last_gate:
            raise MisuseError(
                "two optimizers step after backward passes of their own in one batch, and accumulate is "
                f"{self.window.size}: wrap what is done with a batch in `with accelerator.accumulate():`, or set "
                "accumulate to 1"
            )
        self._last_share, self._last_gate = share, gate

    def _refuse_strays(self, gate: OptimizerGate) -> None:
        for stray in gate.strays:
            if stray[2].requires_grad and stray[2].grad is not None:
                raise UnsyncedGradientError(self._describe_stray(*stray))

    def _check_groups(self, gate: OptimizerGate) -> None:
        """Note what the optimizer steps, and which of it belongs to nothing that averages gradients."""
        gate.num_checked = len(gate.optimizer.param_groups)
        gate.bundle = Bundle(self.bundle.models, (gate.optimizer,))
        gate.strays = [
            (number, index, parameter)
            for number, group in enumerate(gate.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) not in self._known and self.world.size > 1
        ]

    def _describe_stray(self, group: int, index: int, parameter: Tensor) -> str:
        name = _find_name(parameter, self.namespace)
        return (
            f"parameter {index} of group {group} of the optimizer"
            + (f" ({name})" if name else "")
            + f", of shape {tuple(parameter.shape)}, belongs to no prepared model, or was frozen when its model was "
            f"prepared, so its gradient is not averaged over the {self.world.size} workers and they would drift apart. "
            "Put it into a module that is prepared (assign it to an attribute of one before preparing), prepare the "
            "model anew after unfreezing (unwrap_model(model) first), or set requires_grad=False on it"
        )


_NO_GRADIENT = (
    "the loss has no gradient: it was computed under torch.no_grad(), was detached, or depends on no parameter that "
    "requires one. Compute it from the model's output, outside of no_grad()"
)


_NO_MODEL = (
    "backward was called on an accelerator that holds no model, so each worker would train alone. Call "
    "prepare(model, optimizer, loader) first; after an interrupt run the cell again that builds the Accelerator"
)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _find_name(parameter: Tensor, namespace: Mapping[str, Any]) -> str | None:
    for name, value in namespace.items():
        if value is parameter:
            return name
        if isinstance(value, nn.Module):
            for inner, candidate in value.named_parameters():
                if candidate is parameter:
                    return f"{name}.{inner}"
    return None
