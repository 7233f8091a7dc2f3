"""One training run inside an accelerator: backward, clip and step over what was prepared.

Prepared objects refer to this and not to the accelerator, so that a dropped accelerator is really gone and a cell that
builds it anew can take the objects over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.accelerator.training.accumulation import Window
from accel_nb.accelerator.training.first_step_checks import FirstStep, fingerprint
from accel_nb.accelerator.training.loss_weighting import LossReader, Reading, Weighed, WindowWeights
from accel_nb.accelerator.training.optimizer_proxy import OptimizerGate
from accel_nb.config.sections import AccumulationOptions
from accel_nb.data.loader import Share
from accel_nb.errors import MisuseError, UnsyncedGradientError
from accel_nb.precision.half import has_gradient
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.runtime.world import World
from accel_nb.strategies.base import Bundle, Strategy
from accel_nb.telemetry.memory import MemoryMeter
from accel_nb.telemetry.step_meter import StepMeter


class Stepper:
    """Backward passes and optimizer steps; everything here is on the hot path."""

    def __init__(
        self,
        strategy: Strategy,
        world: World,
        comm: Communicator,
        *,
        accumulate: int,
        clip: float | None,
        meter: StepMeter,
        memory: MemoryMeter,
        window: AccumulationOptions | None = None,
        has_sentinels: bool = False,
    ) -> None:
        self.strategy = strategy
        # Replaced while ranks whose data has ended take part in the steps of the others.
        self.finish_gradients = strategy.finish_gradients
        self.is_joined = False
        # Loops over epochs that a checkpoint holds as finished are passing by.
        self.is_replaying = False
        # Replicas may differ for now.
        self._is_apart = False
        self.world = world
        self._comm = comm
        self.bundle = Bundle()
        num_shares = strategy.data_coords()[1]
        self.window = Window(accumulate, num_shares, self._set_sync, on_drop=self._drop_gradients, options=window)
        self.gates: dict[int, OptimizerGate] = {}
        # A loss that is a sum over samples is to count as on one device, not as the mean over workers.
        self.keeps_sums = False
        # The code is plain PyTorch: where no batch is divided, every rank computes what one device would.
        self.is_plain = False
        self.namespace: Mapping[str, Any] = {}
        self.was_skipped = False
        # Ranks draw random numbers of their own.
        self.has_diverged = False
        self.is_inside_backward = False
        # A backward pass ended in its middle: what averages gradients waits for the rest of them.
        self.is_torn = False
        self._has_said_ungated = False
        self._clip = clip
        # Nothing stands between the gate and the optimizer's own step: three calls less.
        self._steps_plainly = not (strategy.capabilities.native_step or strategy.precision.policy.loss_scaling)
        self.meter = meter
        self._memory = memory
        self._known: set[int] = set()
        # What each model had to train when it was prepared: only of that are gradients averaged.
        self._trainable: dict[int, set[int]] = {}
        self._has_sentinels = has_sentinels
        self._weights = WindowWeights(world, comm)
        self._last_share: Share | None = None
        self._last_gate: OptimizerGate | None = None
        self._reader = LossReader()
        self._exchanged: dict[str, bool] = {}
        # What backward was called on inside of an optimizer's closure, each loss times what it counts.
        self._closure_loss: Tensor | None = None

    def follow(self, strategy: Strategy) -> None:
        """Go on with another strategy that divides the data into as many shares; before anything is prepared."""
        self.strategy = strategy
        self.finish_gradients = strategy.finish_gradients
        self._steps_plainly = not (strategy.capabilities.native_step or strategy.precision.policy.loss_scaling)

    def include(self, bundle: Bundle) -> None:
        """Add prepared objects; those that are known already are left out by the caller."""
        self.bundle = self.bundle + bundle
        for model in bundle.models:
            self._trainable[id(model)] = _trainable_in(model)
        self._learn_parameters()
        for model in bundle.models:
            self.strategy.grad_sync(model, self.window.averages)

    def changed_models(self) -> list[nn.Module]:
        """Return the models that train other parameters than when they were prepared."""
        return [model for model in self.bundle.models if self._trainable[id(model)] != _trainable_in(model)]

    def learn_anew(self, models: Iterable[nn.Module]) -> None:
        """Take what the models train now for what is averaged."""
        for model in models:
            self._trainable[id(model)] = _trainable_in(model)
            self.strategy.grad_sync(model, self.window.averages)
        self._learn_parameters()

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
            gate.hold_zero_grad(self.holds_zero_grad)

    @property
    def holds_zero_grad(self) -> bool:
        """Whether an optimizer's ``zero_grad`` has to ask here."""
        return self.window.size > 1 or self.strategy.capabilities.hides_gradients

    def read(self, loss: Tensor) -> Reading:
        """Return what a loss over the present share is taken for."""
        share = self.window.share
        return "mean" if share is None else self._reader.read(loss, share.num_samples)

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, **options: bool) -> None:
        """Compute the gradients of one micro-batch, or of a part of it; with ``weight`` the loss is a sum."""
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
        if not self.gates and not self._has_said_ungated:
            self._say_ungated()
        share, factor, shown = window.share, window.mean_factor, loss
        if self._weights.is_on and weight is None:
            self._weights.switch(False, is_new=not window.is_dirty)
        if weight is not None:
            if self.is_joined:
                raise MisuseError(_NO_WEIGHTS_IN_JOIN)
            shown = loss.detach() / weight
            loss, factor = self._weights.add(loss, weight, share, is_new=not window.is_dirty), 1.0
        elif self.keeps_sums and share is not None and not self.is_joined:
            reading = self._reader.read(loss, share.num_samples)
            if reading == "sum":
                factor = window.sum_factor
            elif reading != "mean" and self._exchanges(reading):
                portion = self._portion(reading.total, share).to(loss.dtype)
                # A share of nothing but ignored targets has a loss of 0 / 0.
                loss, shown, factor = loss * portion, shown.detach().where(portion != 0, 0.0), 1.0
        try:
            if share is None:
                self.meter.add_loss(shown, 1, 0, is_first=not window.has_backward)
            else:
                samples = share.num_samples
                self.meter.add_loss(shown, samples, samples, is_first=not window.has_backward)
        except RuntimeError:
            if loss.numel() == 1:
                raise
            raise MisuseError(_NOT_ONE_VALUE.format(shape=tuple(loss.shape))) from None
        if factor != 1.0:
            loss = loss * factor
        if self._closure_loss is not None:
            self._closure_loss = self._closure_loss + loss.detach()
        window.note_backward()
        self.is_inside_backward = True
        try:
            self.strategy.backward(loss, self.bundle, **options)
        except BaseException:
            self.is_torn = True
            raise
        finally:
            self.is_inside_backward = False

    def step(self, gate: OptimizerGate, closure: Callable[[], Any] | None) -> Any:
        """Step an optimizer if the window closes; returns what the closure returned."""
        gate.num_attempts += 1
        if self.is_inside_backward and self.window.share is not None:
            self._refuse_step_in_backward()
        if closure is not None:
            return self._step_with_closure(gate, closure)
        window = self.window
        if window.size > 1 and window.has_backward and not window.is_in_block:
            self._refuse_second_backward(gate)
            if window.is_out_of_step and window.counts_batches:
                raise MisuseError(_TWICE_ACCUMULATED.format(size=window.size))
        closes, number, factor = window.attempt() if window.has_backward else window.moment()
        if not closes:
            return None
        if gate.finished_in != number:
            self._finish(gate, number, factor)
        if self._clip is not None:
            self.strategy.clip_grad_norm(gate.bundle, self._clip, 2.0, stepped_parameters(gate.optimizer))
        sentinel = self._sentinel(gate) if gate.is_unproven else None
        ran = gate.step_plainly() if self._steps_plainly else gate.run(self.strategy.step) == "ran"
        self._end_step(gate, number, ran)
        if sentinel is not None and ran:
            gate.is_unproven = False
            sentinel.after()
        return None

    def may_zero(self, gate: OptimizerGate) -> bool:
        """Whether an optimizer may clear its gradients: not those of a window that is not closed."""
        window = self.window
        return window.size == 1 or not window.is_dirty or gate.stepped_in == window.number

    def note_zero(self, gate: OptimizerGate) -> None:
        """Hear that an optimizer has cleared the gradients that it sees."""
        if self.strategy.capabilities.hides_gradients:
            self.strategy.drop_gradients(gate.bundle)

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
            self.strategy.clip_grad_value(bundle, clip_value, clipped)

    @property
    def known_parameters(self) -> Set[int]:
        """The ids of the parameters whose gradients are averaged."""
        return self._known

    @property
    def num_steps(self) -> int:
        """How many optimizer steps were reported."""
        return self.meter.step

    def fingerprint(self) -> str | None:
        """Return what ranks' replicas of the trained models agree on; None where each has something of its own."""
        has_replicas = not self.strategy.capabilities.shards_params and not self._is_apart
        if not (self._has_sentinels and has_replicas and self.world.size > 1):
            return None
        return fingerprint(self.stepped_models())

    def resume_at(self, step: int, num_held: int) -> None:
        """Count optimizer steps from ``step`` on, inside of a window with ``num_held`` micro-batches done."""
        self.meter.step = step
        self.window.resume(num_held)

    def stepped_models(self) -> list[nn.Module]:
        """Return the models that some optimizer steps: not loss modules, teachers or averaged copies."""
        stepped = {id(value) for optimizer in self.bundle.optimizers for value in stepped_parameters(optimizer)}
        return [model for model in self.bundle.models if any(id(value) in stepped for value in model.parameters())]

    @property
    def held_bytes(self) -> dict[str, int]:
        """What this rank holds, as of the latest sample."""
        return self._memory.held

    def flush(self) -> None:
        """Report what is still on its way from the device."""
        self.meter.flush()

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
                self.strategy.grad_sync(model, self.window.averages)

    def keep_local(self, models: Iterable[nn.Module], is_on: bool) -> None:
        """Keep the gradients of models on this rank until told otherwise; every rank must call."""
        self._is_apart = is_on
        for model in models:
            self.strategy.keep_local(model, is_on)

    def _set_sync(self, is_on: bool) -> None:
        for model in self.bundle.models:
            self.strategy.grad_sync(model, is_on)

    def _drop_gradients(self) -> None:
        self.strategy.drop_gradients(self.bundle)

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
                loss = self._evaluate(closure)
            _, number, factor = self.window.attempt()
            self._finish(gate, number, factor)
            if self._clip is not None:
                self.strategy.clip_grad_norm(gate.bundle, self._clip, 2.0, stepped_parameters(gate.optimizer))
            return loss

        # Not through the strategy: its step returns no loss, and there is nothing to scale.
        result = gate.run(lambda optimizer: optimizer.step(), finished_closure)
        self._end_step(gate, number, True)
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call an optimizer's closure and return its loss as that of the whole batch.

        An optimizer that searches along a line decides by it, and all ranks must decide alike.
        """
        if self.world.size == 1 or self.is_joined:
            return closure()
        self._closure_loss = nothing = torch.zeros((), device=self.world.device)
        try:
            loss = closure()
            total = self._closure_loss
        finally:
            self._closure_loss = None
        if total is nothing or not isinstance(loss, Tensor | float):
            return loss
        total = self._comm.all_reduce(total.to(torch.float64).reshape(1), "mean").reshape(())
        return total.to(loss.dtype) if isinstance(loss, Tensor) else total.item()

    def _sentinel(self, gate: OptimizerGate) -> FirstStep | None:
        """Return what looks at a first step, once it has seen what is about to be stepped."""
        if not self._has_sentinels or self._is_apart:
            gate.is_unproven = False
            return None
        if has_gradient(gate.optimizer):
            self.strategy.unscale(gate.optimizer)
        sentinel = FirstStep(
            gate.optimizer,
            self.bundle,
            self._comm,
            has_replicas=not self.strategy.capabilities.shards_params,
            is_plain=self.is_plain,
            name=lambda parameter: _find_name(parameter, self.namespace) or _name_in(self.bundle.models, parameter),
        )
        sentinel.before()
        return sentinel

    def _finish(self, gate: OptimizerGate, number: int, factor: float) -> None:
        """Make the gradients of an optimizer what one process would have, once for each window."""
        gate.finished_in = number
        if len(gate.optimizer.param_groups) != gate.num_checked:
            self._check_groups(gate)
        if gate.strays:
            self._refuse_strays(gate)
        self.finish_gradients(gate.bundle, self._weights.factor(number, factor))

    def _end_step(self, gate: OptimizerGate, number: int, ran: bool) -> None:
        if ran:
            gate.num_ran += 1
        gate.stepped_in = number
        self.was_skipped = not ran
        now = self.meter.end_step(gate.learning_rate, not ran)
        if now >= self._memory.due:
            hidden = self.strategy.hidden_bytes()
            self._memory.sample(now, self.meter.step, self.bundle.models, self.bundle.optimizers, hidden)

    def _bundle_of(self, gates: list[OptimizerGate]) -> Bundle:
        return Bundle(self.bundle.models, tuple([gate.optimizer for gate in gates]))

    def _owners(self, parameters: list[Tensor]) -> list[OptimizerGate]:
        if len(self.gates) <= 1:
            return list(self.gates.values())
        wanted = set(map(id, parameters))
        return [
            gate
            for gate in self.gates.values()
            if any(id(parameter) in wanted for parameter in stepped_parameters(gate.optimizer))
        ]

    def _exchanges(self, reading: Weighed) -> bool:
        """Whether ranks exchange the weights of such losses: asked once for each kind, answered alike on every rank."""
        known = self._exchanged.get(reading.key)
        if known is None:
            needed = torch.tensor([reading.is_needed], dtype=torch.int32, device=reading.total.device)
            known = self._exchanged[reading.key] = bool(self._comm.all_reduce(needed, "max"))
        return known

    def _portion(self, weight: Tensor, share: Share) -> Tensor:
        """Return what a loss of this total weight is multiplied by, for the ranks' mean to be that of all weights."""
        own = weight.detach().to(torch.float64).reshape(1) * bool(share.num_samples)
        return (own / self._comm.all_reduce(own.clone()) * (self.world.size / self.window.size)).reshape(())

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

    def _say_ungated(self) -> None:
        """Say once that no optimizer is prepared where its steps should wait, or see other gradients."""
        self._has_said_ungated = True
        scales = self.strategy.precision.policy.loss_scaling
        if (self.window.size > 1 or scales) and self.world.is_main:
            lacking = "unscales its gradients" if scales else f"holds its steps back for {self.window.size} batches"
            warnings.warn(
                f"no optimizer is prepared, so nothing {lacking}: prepare(model, optimizer, ...), unless the script "
                "does so itself",
                stacklevel=4,
            )

    def _holds(self, parameter: Tensor) -> bool:
        return any(parameter is value for model in self.bundle.models for value in model.parameters())

    def _refuse_step_in_backward(self) -> None:
        """Refuse a step by gradients of one share; those of a model that is divided are averaged before hooks run."""
        if self.world.size > 1 and not self.strategy.capabilities.shards_params:
            raise MisuseError(_STEP_IN_BACKWARD)

    def _refuse_strays(self, gate: OptimizerGate) -> None:
        computes_alike = self.is_plain and self.window.share is None and not self.has_diverged
        for stray in gate.strays:
            if computes_alike and not self._holds(stray[2]):
                continue  # a tensor in no module, whose gradient is the same on every rank
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
            "model anew after unfreezing (free_memory(model) first), or set requires_grad=False on it"
        )


_NO_GRADIENT = (
    "the loss has no gradient: it was computed under torch.no_grad(), was detached, or depends on no parameter that "
    "requires one. Compute it from the model's output, outside of no_grad()"
)


_STEP_IN_BACKWARD = (
    "an optimizer steps inside of the backward pass, in a hook on gradients, before these are averaged over the "
    "workers: step after backward() instead, divide the model by `--strategy fsdp`, or use one worker"
)


_NO_WEIGHTS_IN_JOIN = (
    "backward was given a weight inside of join_uneven_inputs, where ranks that have ended cannot add theirs: leave "
    "the weight out, or divide the data evenly instead of joining"
)


_NOT_ONE_VALUE = (
    "backward takes a loss of one value, and got a tensor of shape {shape}: call .mean() on it, or .sum() and say of "
    "how much by weight"
)


_TWICE_ACCUMULATED = (
    "gradients of several batches were summed up before this step, and gradient_accumulation_steps is {size}: without "
    "accumulate() a step is tried after each batch, or after {size} batches of which each was trained on before the "
    "next was read. Wrap what is done with each batch in `with accelerator.accumulate(model):`, or leave "
    "gradient_accumulation_steps at 1 and divide the loss yourself; a loss that is a sum over tokens is weighed by "
    "backward(loss, weight=num_tokens)"
)


_NO_MODEL = (
    "backward was called on an accelerator that holds no model, so each worker would train alone. Call "
    "prepare(model, optimizer, loader) first; after an interrupt run the cell again that builds the Accelerator"
)


def _trainable_in(model: nn.Module) -> set[int]:
    return {id(value) for value in model.parameters() if value.requires_grad}


def _name_in(models: Iterable[nn.Module], parameter: Tensor) -> str | None:
    listed = list(models)
    for model in listed:
        for name, candidate in model.named_parameters():
            if candidate is parameter:
                return f"{type(model).__name__}.{name}" if len(listed) > 1 else name
    return None


def _find_name(parameter: Tensor, namespace: Mapping[str, Any]) -> str | None:
    for name, value in namespace.items():
        if value is parameter:
            return name
        if isinstance(value, nn.Module):
            for inner, candidate in value.named_parameters():
                if candidate is parameter:
                    return f"{name}.{inner}"
    return None
