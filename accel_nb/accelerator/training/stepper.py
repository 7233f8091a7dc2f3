"""Backward passes, gradient clipping and optimizer steps of the objects that one accelerator has prepared.

Prepared objects reference the `Stepper` and not the accelerator. So an accelerator without other references is garbage
collected, and a cell that builds a new one can prepare the same objects again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.accelerator.training.accumulation import AccumulationWindow
from accel_nb.accelerator.training.closure_loss import ClosureLoss
from accel_nb.accelerator.training.first_step_checks import FirstStepCheck, replica_digest
from accel_nb.accelerator.training.loss_classification import LossReduction
from accel_nb.accelerator.training.loss_weighting import LossWeights, mean_of_sum
from accel_nb.accelerator.training.optimizer_proxy import OptimizerProxy
from accel_nb.accelerator.training.parameter_names import name_in_models, name_in_namespace
from accel_nb.accelerator.training.parameter_references import ParameterReferences
from accel_nb.accelerator.training.recorded_models import RecordedModels
from accel_nb.accelerator.training.replica_averaging import average_replica
from accel_nb.accelerator.training.sharded_steps import refuse_failed_optimizer, refuse_wrong_optimizer
from accel_nb.accelerator.training.unaveraged import find_unaveraged
from accel_nb.config.sections import AccumulationOptions
from accel_nb.data.order import BatchShare
from accel_nb.errors import MisuseError, UnsyncedGradientError
from accel_nb.precision.half import has_gradient
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.process.user_code import is_in_other_thread, warn_at_user_line
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.runtime.world import World
from accel_nb.strategies.base import Bundle, GradientHolding, Strategy
from accel_nb.telemetry.memory import MemoryMeter
from accel_nb.telemetry.step_meter import StepMeter
from accel_nb.telemetry.time_use import TimeMeter


class Stepper:
    """Runs backward passes and optimizer steps. Its methods are on the hot path."""

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
        time_use: TimeMeter,
        window: AccumulationOptions | None = None,
        has_checks: bool = False,
        counts_samples: bool = True,
    ) -> None:
        """Begin without objects; ``counts_samples`` is False if another rank reads and counts the same data."""
        # Whether the code is a plain cell: if no batch is divided, every rank computes the same as one device.
        self.is_plain_cell = False
        # Whether the ranks compute the same, in a plain cell, whose threads run in another order on each rank.
        self.computes_in_main_thread = False
        self.set_strategy(strategy)
        self.is_joined = False
        # Whether loops run over epochs that a loaded checkpoint has finished, in which nothing is trained.
        self.is_replaying = False
        # How many times averaging of gradients is switched off; replicas may differ then.
        self._num_local = 0
        # The ids of models whose replicas differ since `LocalSGD` began, and whether it was used at all, on every rank.
        self._differing: set[int] = set()
        self._has_made_local_steps = False
        # The models of the open blocks of `without_sync`.
        self._unsynced: list[list[nn.Module]] = []
        self.world = world
        self._comm = comm
        self.bundle = Bundle()
        self.window = AccumulationWindow(
            accumulate, strategy.data_coords()[1], self._update_all_sync, on_drop=self._drop_gradients, options=window
        )
        self.optimizer_proxies: dict[int, OptimizerProxy] = {}
        # Whether an optimizer that steps no prepared model is refused; else a warning says so.
        self.refuses_unprepared = True
        self.namespace: dict[str, Any] = {}
        self.was_skipped = False
        # Whether each rank has its own random number stream.
        self.has_rank_rng = False
        self.is_inside_backward = False
        # Whether a backward pass raised: averaging may then still wait for the missing gradients.
        self.has_interrupted_backward = False
        self._has_warned_unprepared = False
        self._clip = clip
        self.meter = meter
        self._memory = memory
        self.time_use = time_use
        self._averaged_ids: set[int] = set()
        self._recorded = RecordedModels()
        self._has_checks = has_checks
        self._counts_samples = counts_samples
        self.weights = LossWeights(world, comm)
        self._last_share: BatchShare | None = None
        self._last_proxy: OptimizerProxy | None = None
        self._closure_loss = ClosureLoss(world, comm)

    def set_strategy(self, strategy: Strategy) -> None:
        """Replace the strategy before anything is prepared; the new one must divide data into as many shares."""
        self.strategy = strategy
        if self.is_plain_cell:
            self.adapt_to_plain_cells()
        # Replaced inside of join_uneven_inputs, where ranks without data take part in the steps of other ranks.
        self.finish_gradients = strategy.finish_gradients
        # Whether the optimizer's own step can be called without the strategy, which saves three calls.
        self._can_step_directly = not (strategy.capabilities.overrides_step or strategy.precision.policy.loss_scaling)

    def adapt_to_plain_cells(self) -> None:
        """Make the strategy leave the gradients and references to parameters that code for one device expects."""
        self.is_plain_cell = True
        self.strategy.prepare_for_plain_cells()
        self.strategy.set_on_replaced(ParameterReferences(lambda: self.namespace).replace)

    def add(self, bundle: Bundle) -> None:
        """Add prepared objects; the caller leaves out those that were added before."""
        self.bundle = self.bundle + bundle
        for model in bundle.models:
            self._recorded.record(model)
        self._update_averaged()
        self.update_sync(bundle.models)

    def changed_models(self) -> list[nn.Module]:
        """Return the models whose trainable parameters, their dtypes, or the functions of their classes have changed.

        They are compared with those at the time when the model was prepared.
        """
        by_names = self.strategy.capabilities.shards_params
        return [model for model in self.bundle.models if self._recorded.has_changed(model, compares_names=by_names)]

    def is_outdated(self) -> bool:
        """Return whether a model's code, or the dtype or ``requires_grad`` of a parameter, has changed.

        See `changed_models`.
        """
        has_own_parameters = not self.strategy.capabilities.shards_params
        return self._recorded.is_outdated(self.bundle.models, compares_parameters=has_own_parameters)

    def refresh_trainable(self, models: Iterable[nn.Module]) -> None:
        """Average the gradients of the parameters that currently require gradients."""
        changed = list(models)
        for model in changed:
            self._recorded.record(model)
        self.update_sync(changed)
        self._update_averaged()

    def remove(self, objects: Iterable[Any]) -> None:
        """Remove prepared objects; with the last optimizer also the open window."""
        removed = {id(item) for item in objects}
        self._recorded.remove(removed)
        self._differing -= removed
        self.bundle = Bundle(
            tuple(model for model in self.bundle.models if id(model) not in removed),
            tuple(optimizer for optimizer in self.bundle.optimizers if id(optimizer) not in removed),
            tuple(scheduler for scheduler in self.bundle.schedulers if id(scheduler) not in removed),
        )
        if not self.bundle.optimizers:
            self.window.discard()  # of optimizers that are gone
        self._update_averaged()

    def set_accumulation(self, size: int) -> None:
        """Change how many micro-batches a window has, from the next one on."""
        self.window.size = size
        for proxy in self.optimizer_proxies.values():
            proxy.defer_zero_grad(self.defers_zero_grad)

    def discard_window(self) -> bool:
        """Drop the gradients of an open window of several micro-batches; return whether there was one.

        Every rank must call: after an error their windows may hold different micro-batches.
        """
        is_open = self.window.size > 1 and (self.window.has_gradients or self.window.num_pending > 0)
        self.window.discard()
        if self.window.size > 1:
            self._drop_gradients()
            for proxy in self.optimizer_proxies.values():
                proxy.finished_window = -1
        return is_open

    @property
    def defers_zero_grad(self) -> bool:
        """Whether ``zero_grad`` of optimizers must be intercepted."""
        return self.window.size > 1 or self.strategy.capabilities.holds_gradients

    def classify_loss(self, loss: Tensor) -> LossReduction:
        """Return how a loss over the current share is reduced."""
        return self.weights.classify(loss, self.window.share)

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, **options: Any) -> None:
        """Compute the gradients of one micro-batch, or of a part of it.

        With ``weight`` the loss is a sum, and gradients are divided by the total weight of the window. Raises
        `MisuseError` for a loss that requires no gradient or has several values, and if no model is prepared.
        """
        window = self.window
        try:
            if not loss.requires_grad:
                raise MisuseError(_NO_GRADIENT)
            if not self.bundle.models and self.world.size > 1:
                raise MisuseError(_NO_MODEL)
            if self._differing and not self._num_local:
                raise MisuseError(_REPLICAS_DIFFER)
        except AttributeError:
            raise MisuseError(
                f"backward takes the loss as a tensor, and got a {type(loss).__name__}; do not call .item() on it"
            ) from None
        if not self.optimizer_proxies and not self._has_warned_unprepared:
            self._warn_unprepared()
        share = window.share
        loss, factor, shown = self.weights.apply_weight(loss, weight, window, is_joined=self.is_joined)
        try:
            if share is None:
                self.meter.add_loss(shown, 1, 0, is_first=not window.has_backward)
            else:
                samples = share.num_samples
                counted = samples if self._counts_samples else 0
                self.meter.add_loss(shown, samples, counted, is_first=not window.has_backward)
        except RuntimeError:
            if loss.numel() == 1:
                raise
            raise MisuseError(_NOT_ONE_VALUE.format(shape=tuple(loss.shape))) from None
        if isinstance(factor, Tensor) or factor != 1.0:
            loss = loss * factor
        self._closure_loss.add(loss, factor)
        window.record_backward()
        if self.strategy.capabilities.holds_gradients:  # gradients that were completed before do not include this pass
            for proxy in self.optimizer_proxies.values():
                proxy.finished_window = -1
        self.is_inside_backward = True
        try:
            self.strategy.backward(loss, self.bundle, **options)
        except BaseException:
            self.has_interrupted_backward = True
            raise
        finally:
            self.is_inside_backward = False

    def backward_by(
        self, compute: Callable[[Callable[[], float | Tensor]], Tensor | None], weight: float | Tensor | None
    ) -> Tensor | None:
        """Compute the gradients of one micro-batch by a function that runs forward and backward passes itself.

        ``compute`` gets a function that returns the factor of the loss, and returns the loss; None, without having
        called it, if it has computed nothing. With ``weight`` the loss is a sum, as in `backward`.
        """
        window, share = self.window, self.window.share
        self.weights.refuse_weight(weight, is_joined=self.is_joined)
        is_first, is_new, mean_factor = not window.has_backward, not window.has_gradients, window.mean_factor

        def factor() -> float | Tensor:
            return self.weights.factor_of_pass(weight, share, is_new=is_new, mean_factor=mean_factor)

        self.is_inside_backward = True
        try:
            loss = compute(factor)
        except BaseException:
            self.has_interrupted_backward = True
            raise
        finally:
            self.is_inside_backward = False
        if loss is not None:
            window.record_backward()
            shown = loss if weight is None else mean_of_sum(loss, weight)
            samples = 1 if share is None else share.num_samples
            counted = samples if self._counts_samples and share is not None else 0
            self.meter.add_loss(shown, samples, counted, is_first=is_first)
        return loss

    def computes_alone(self) -> bool:
        """Return whether the caller is another thread of a plain cell: it computes whole batches alone."""
        return self.computes_in_main_thread and is_in_other_thread()

    def step(self, proxy: OptimizerProxy, closure: Callable[[], Any] | None) -> Any:
        """Step an optimizer if the window closes; return the result of the closure."""
        if self.computes_alone():
            return proxy.step_alone()
        proxy.num_step_calls += 1
        if self.is_inside_backward:
            self._refuse_step_in_backward()
        if closure is not None:
            return self._step_with_closure(proxy, closure)
        window = self.window
        if window.size > 1 and window.has_backward and not (window.is_in_block or window.counts_blocks_only):
            self._refuse_second_backward(proxy)
            if window.accumulates_in_script and window.counts_batches:
                raise MisuseError(_TWICE_ACCUMULATED.format(size=window.size))
        closes, number, factor = window.begin_step() if window.has_backward else window.step_decision()
        if not closes:
            return None
        if proxy.finished_window != number:
            self._finish(proxy, number, factor)
        if self._clip is not None:
            norm = self.strategy.clip_grad_norm(proxy.bundle, self._clip, 2.0, stepped_parameters(proxy.optimizer))
            self.meter.report_norm(norm)
        first_step_check = None
        if proxy.needs_check:
            if self.strategy.capabilities.shards_params:
                refuse_wrong_optimizer(proxy.optimizer)
            first_step_check = self._build_first_step_check(proxy)
        try:
            ran = proxy.step_directly() if self._can_step_directly else proxy.run(self.strategy.step) == "ran"
        except RuntimeError as error:
            if self.strategy.capabilities.shards_params:
                refuse_failed_optimizer(proxy.optimizer, error)
            raise
        self._end_step(proxy, number, ran)
        if first_step_check is not None and ran:
            proxy.needs_check = not first_step_check.verify(proxy.num_steps_run)
            self.meter.restart_clock()
        return proxy.result

    def run_step(self, optimizer: Optimizer, step: Callable[[], Any], *, has_closure: bool) -> Any:
        """Call ``step``, the original method of an optimizer, as the strategy does."""
        return self.strategy.run_step(optimizer, step, has_closure=has_closure)

    def may_zero_grad(self, proxy: OptimizerProxy) -> bool:
        """Return whether an optimizer may clear its gradients: not while they belong to an open window."""
        window = self.window
        if window.counts_blocks_only and not window.is_in_block:
            return window.syncs_gradients
        return window.size == 1 or not window.has_gradients or proxy.stepped_window == window.number

    def handle_zero_grad(self, proxy: OptimizerProxy, *, drops: bool) -> None:
        """Drop the gradients that a strategy holds outside of ``parameter.grad``, or set them to zero."""
        if (holder := self.gradient_holder) is not None:
            if drops:
                self.strategy.drop_gradients(proxy.bundle)
            else:
                holder.zero_gradients(proxy.bundle)
            proxy.finished_window = -1

    @property
    def gradient_holder(self) -> GradientHolding | None:
        """The strategy, if it holds gradients outside of ``parameter.grad``."""
        return cast(GradientHolding, self.strategy) if self.strategy.capabilities.holds_gradients else None

    def complete_held_gradients(self) -> None:
        """Complete the gradients that a strategy holds, unless a window is open; every rank must call."""
        if (holder := self.gradient_holder) is None:
            return
        if self.complete_gradients(list(stepped_parameters(*self.bundle.optimizers))) is not None:
            holder.apply_gradient_writes()

    @property
    def has_used_gradients(self) -> bool:
        """Whether steps of all optimizers have used the gradients of all parameters, none of which overflowed."""
        latest = self.window.number - 1
        steps = [proxy.stepped_window == latest and not proxy.was_skipped for proxy in self.optimizer_proxies.values()]
        if self.window.has_gradients or not all(steps):
            return False
        stepped = set(map(id, stepped_parameters(*self.bundle.optimizers)))
        parameters = [value for model in self.bundle.models for value in model.parameters()]
        return all(value.grad is None or id(value) in stepped for value in parameters)

    def record_dropped_gradients(self, parameter: Tensor) -> None:
        """Record that code has set the gradient of a parameter to None: later ones are not complete."""
        for proxy in self._owners([parameter]):
            proxy.finished_window = -1

    def clip_norm(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients of a closing window and return their norm; in an open window only return the norm."""
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        bundle = self.complete_gradients(clipped)
        if bundle is None:
            gradients = [parameter.grad for parameter in clipped if parameter.grad is not None]
            return torch.nn.utils.get_total_norm(gradients, norm_type)
        norm = self.strategy.clip_grad_norm(bundle, max_norm, norm_type, clipped)
        self.meter.report_norm(norm)
        return norm

    def has_any_parameter(self, parameters: list[Tensor]) -> bool:
        """Return whether any of the parameters belongs to a prepared model, and the caller takes part in exchanges."""
        return not self.computes_alone() and any(id(parameter) in self._averaged_ids for parameter in parameters)

    def complete_gradients(self, parameters: list[Tensor]) -> Bundle | None:
        """Average and unscale the gradients of the optimizers that step ``parameters``, as in one process.

        Return these optimizers; None inside of an open window, where gradients are not complete.
        """
        closes, number, factor = self.window.step_decision()
        if not closes:
            return None
        owners = self._owners(parameters)
        for proxy in owners:
            if proxy.finished_window != number:
                self._finish(proxy, number, factor)
        return self._bundle_of(owners)

    def clip_value(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient of a closing window; do nothing inside of an open one."""
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        bundle = self.complete_gradients(clipped)
        if bundle is not None:
            self.strategy.clip_grad_value(bundle, clip_value, clipped)

    @property
    def averaged_parameters(self) -> Set[int]:
        """The ids of the parameters whose gradients are averaged."""
        return self._averaged_ids

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps that were made."""
        return self.meter.step

    def replica_digest(self) -> str | None:
        """Return a digest that is equal on ranks with equal replicas; None if they may differ, or checks are off."""
        has_replicas = not self.strategy.capabilities.shards_params and not self._num_local
        if not (self._has_checks and has_replicas and self.world.size > 1):
            return None
        return replica_digest(self.stepped_models())

    def resume_at(self, step: int, num_pending: int) -> None:
        """Continue from a loaded checkpoint: set the number of optimizer steps and of complete micro-batches."""
        if not self._num_local:
            self._differing.clear()  # all ranks have loaded the same weights
        self.meter.resume_at(step)
        self.window.resume(num_pending)

    def stepped_models(self) -> list[nn.Module]:
        """Return the models whose parameters an optimizer steps: no loss modules, teachers or averaged copies."""
        stepped = {id(value) for optimizer in self.bundle.optimizers for value in stepped_parameters(optimizer)}
        return [model for model in self.bundle.models if any(id(value) in stepped for value in model.parameters())]

    @property
    def memory_bytes(self) -> dict[str, int]:
        """This rank's memory in bytes by kind, as of the latest sample."""
        return self._memory.bytes_by_kind

    def flush(self) -> None:
        """Report the values that are still being copied from the device."""
        self.meter.flush()

    def check_all_call(self) -> None:
        """Raise `MisuseError` where ranks that have run out of data do not make the calls of the others."""
        if self.is_joined:
            raise MisuseError(REFUSED_IN_JOIN)

    @contextmanager
    def without_sync(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Do not average the gradients of backward passes in the block over ranks."""
        chosen = list(models)
        self._unsynced.append(chosen)
        self.update_sync(chosen)
        try:
            yield
        finally:
            self._unsynced = [other for other in self._unsynced if other is not chosen]
            self.update_sync(chosen)

    def update_sync(self, models: Iterable[nn.Module]) -> None:
        """Average the models' gradients in the next passes, unless the window or a block of `without_sync` does not."""
        for model in models:
            is_unsynced = any(model is other for chosen in self._unsynced for other in chosen)
            self.strategy.grad_sync(model, self.window.averages_gradients and not is_unsynced)

    def _update_all_sync(self) -> None:
        self.update_sync(self.bundle.models)

    def set_local_gradients(self, models: Iterable[nn.Module], is_on: bool) -> None:
        """Switch local gradients on or off: while on, the models' gradients are not averaged. Every rank must call."""
        self._num_local += 1 if is_on else -1
        for model in models:
            self.strategy.keep_local(model, is_on)

    def begin_local_steps(self, model: nn.Module) -> None:
        """Begin to train the replicas of a model apart; every rank must call."""
        if not self._num_local:
            self.average_replicas()
        self._has_made_local_steps = True
        self._differing.add(id(model))
        self.set_local_gradients([model], True)

    def end_local_steps(self, model: nn.Module, *, averages: bool) -> None:
        """Average gradients again, and with ``averages``, for which every rank must call, the replicas first."""
        self.set_local_gradients([model], False)
        if averages:
            average_replica(self._comm, self.bundle.optimizers, model)
            self._differing.discard(id(model))

    def average_replicas(self) -> None:
        """Average the replicas that differ on any rank; every rank must call."""
        if not self._has_made_local_steps:
            return
        own = [number for number, model in enumerate(self.bundle.models) if id(model) in self._differing]
        for number in sorted({number for numbers in self._comm.all_gather_json(own) for number in numbers}):
            average_replica(self._comm, self.bundle.optimizers, self.bundle.models[number])
        if not self._num_local:
            self._differing.clear()

    def has_own_weights(self, model: nn.Module) -> bool:
        """Return whether this rank's replica of a model differs from others, which `LocalSGD` has yet to average."""
        return id(model) in self._differing

    @property
    def makes_local_steps(self) -> bool:
        """Whether replicas are trained apart now, by `LocalSGD`, or in a block that joins uneven inputs."""
        return self._num_local > 0

    def _drop_gradients(self) -> None:
        self.strategy.drop_gradients(self.bundle)

    def _step_with_closure(self, proxy: OptimizerProxy, closure: Callable[[], Any]) -> Any:
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
            _, number, factor = self.window.begin_step() if self.window.has_backward else self.window.step_decision()
            self._finish(proxy, number, factor)
            if self._clip is not None:
                self.strategy.clip_grad_norm(proxy.bundle, self._clip, 2.0, stepped_parameters(proxy.optimizer))
            return loss

        # The strategy's step is not called: it returns no loss, and there is nothing to scale.
        result = proxy.run(lambda optimizer: optimizer.step(), finished_closure)
        self._end_step(proxy, number, True)
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call an optimizer's closure and return the loss of the whole batch."""
        if self.world.size == 1 or self.is_joined:
            return closure()
        return self._closure_loss.evaluate(closure)

    def _build_first_step_check(self, proxy: OptimizerProxy) -> FirstStepCheck | None:
        """Return the check of an optimizer's first step, with the state before the step recorded."""
        if not self._has_checks or self._num_local:
            proxy.needs_check = False
            return None
        if has_gradient(proxy.optimizer):
            self.strategy.unscale(proxy.optimizer)
        check = FirstStepCheck(
            proxy.optimizer,
            self.bundle,
            self._comm,
            has_replicas=not self.strategy.capabilities.shards_params,
            is_plain=self.is_plain_cell,
            refuses_unprepared=self.refuses_unprepared,
            name=lambda parameter: (
                name_in_namespace(parameter, self.namespace) or name_in_models(self.bundle.models, parameter)
            ),
        )
        check.record()
        return check

    def _finish(self, proxy: OptimizerProxy, number: int, factor: float) -> None:
        """Average and unscale the gradients of an optimizer, once for each window."""
        proxy.finished_window = number
        if len(proxy.optimizer.param_groups) != proxy.num_groups_checked:
            self._check_groups(proxy)
        if proxy.unaveraged:
            self._refuse_unaveraged(proxy)
        self.finish_gradients(proxy.bundle, self.weights.rescaling(number, factor))

    def _end_step(self, proxy: OptimizerProxy, number: int, ran: bool) -> None:
        if ran:
            proxy.num_steps_run += 1
        proxy.stepped_window = number
        self.was_skipped = proxy.was_skipped = not ran
        now = self.meter.end_step(proxy.learning_rate, not ran, proxy)
        if now >= self._memory.due:
            for name, value in self.strategy.statistics().items():
                self.meter.report_value(name, value)
            hidden = self.strategy.bytes_outside_of_grad()
            self._memory.sample(now, self.meter.run_step, self.bundle.models, self.bundle.optimizers, hidden)
            self.time_use.sample(now, self.meter.run_step)

    def _bundle_of(self, proxies: list[OptimizerProxy]) -> Bundle:
        return Bundle(self.bundle.models, tuple([proxy.optimizer for proxy in proxies]))

    def _owners(self, parameters: list[Tensor]) -> list[OptimizerProxy]:
        if len(self.optimizer_proxies) <= 1:
            return list(self.optimizer_proxies.values())
        wanted = set(map(id, parameters))
        return [
            proxy
            for proxy in self.optimizer_proxies.values()
            if any(id(parameter) in wanted for parameter in stepped_parameters(proxy.optimizer))
        ]

    def _update_averaged(self) -> None:
        includes_frozen = self.is_plain_cell and self.strategy.capabilities.replicates
        self._averaged_ids = {
            key
            for model in self.bundle.models
            for key in (map(id, model.parameters()) if includes_frozen else self._recorded.trainable(model))
        }
        for proxy in self.optimizer_proxies.values():
            proxy.num_groups_checked = -1

    def _refuse_second_backward(self, proxy: OptimizerProxy) -> None:
        """Raise `MisuseError` if a second optimizer steps in one batch: the batch would count as two micro-batches."""
        share = self.window.share
        if share is not None and share is self._last_share and proxy is not self._last_proxy:
            raise MisuseError(
                "two optimizers step after backward passes of their own in one batch, and accumulate is "
                f"{self.window.size}: wrap what is done with a batch in `with accelerator.accumulate():`, or set "
                "accumulate to 1"
            )
        self._last_share, self._last_proxy = share, proxy

    def _warn_unprepared(self) -> None:
        """Warn once that no optimizer is prepared, although gradients are accumulated or losses are scaled."""
        self._has_warned_unprepared = True
        scales = self.strategy.precision.policy.loss_scaling
        if (self.window.size > 1 or scales) and self.world.is_main:
            missing = "unscales its gradients" if scales else f"holds its steps back for {self.window.size} batches"
            warn_at_user_line(
                f"no optimizer is prepared, so nothing {missing}: prepare(model, optimizer, ...), unless the script "
                "does so itself"
            )

    def _has_parameter(self, parameter: Tensor) -> bool:
        return any(parameter is value for model in self.bundle.models for value in model.parameters())

    def _refuse_step_in_backward(self) -> None:
        """Raise `MisuseError` for a step inside of a backward pass, which would use the gradients of one share.

        A sharded model is excepted: its gradients are averaged before hooks on them run. Gradients that a strategy
        holds elsewhere are complete only after the pass.
        """
        if self.strategy.capabilities.holds_gradients:
            raise MisuseError(_STEP_IN_BACKWARD)
        if self.window.is_divided and self.world.size > 1 and not self.strategy.capabilities.shards_params:
            raise MisuseError(_STEP_IN_BACKWARD)

    def _refuse_unaveraged(self, proxy: OptimizerProxy) -> None:
        """Raise `UnsyncedGradientError` if a parameter has a gradient that is not averaged over ranks."""
        is_equal_on_ranks = self.is_plain_cell and not self.window.is_divided and not self.has_rank_rng
        for unaveraged in proxy.unaveraged:
            if is_equal_on_ranks and not self._has_parameter(unaveraged.parameter):
                continue  # a tensor in no module; its gradient is the same on every rank
            if unaveraged.has_gradient:
                raise UnsyncedGradientError(unaveraged.describe(self.namespace, self.world.size))

    def _check_groups(self, proxy: OptimizerProxy) -> None:
        """Record the optimizer's parameters that are in no prepared model, so that their gradients are not averaged."""
        proxy.num_groups_checked = len(proxy.optimizer.param_groups)
        proxy.bundle = Bundle(self.bundle.models, (proxy.optimizer,))
        proxy.unaveraged = () if self.world.size == 1 else find_unaveraged(proxy.optimizer, self._averaged_ids)


_NO_GRADIENT = (
    "the loss has no gradient: it was computed under torch.no_grad(), was detached, or depends on no parameter that "
    "requires one. Compute it from the model's output, outside of no_grad()"
)


_STEP_IN_BACKWARD = (
    "an optimizer steps inside of the backward pass, in a hook on gradients, before these are averaged over the "
    "workers: step after backward() instead, shard the model with `--strategy fsdp`, or use one worker"
)


_NOT_ONE_VALUE = (
    "backward takes a loss of one value, and got a tensor of shape {shape}: call .mean() on it, or .sum() and pass "
    "the number of summed values as weight"
)


_TWICE_ACCUMULATED = (
    "gradients of several batches were summed up before this step, and gradient_accumulation_steps is {size}: without "
    "accumulate(), call step() after each batch, or after {size} batches, each with its backward() before the next "
    "batch is read. Or wrap the code for one batch in `with accelerator.accumulate(model):`, or leave "
    "gradient_accumulation_steps at 1 and divide the loss yourself; for a loss that is a sum over tokens call "
    "backward(loss, weight=num_tokens)"
)


_REPLICAS_DIFFER = (
    "an error has ended a LocalSGD block, so the workers hold different weights. They are averaged where all workers "
    "come next: begin a loop over a prepared loader, or a LocalSGD block, before the next backward pass"
)


REFUSED_IN_JOIN = (
    "inside of join_uneven_inputs, ranks that have run out of data do not make this call; make it after the block"
)


_NO_MODEL = (
    "backward was called on an accelerator that holds no model, so each worker would train alone. Call "
    "prepare(model, optimizer, loader) first; after an interrupt run the cell that builds the Accelerator again"
)
