"""The strategy `deepspeed`: ZeRO shards optimizer state, gradients and parameters among the ranks, by stage.

DeepSpeed's engine shards and communicates. Accumulation windows, clipping, precision and checkpoints work as in all
strategies: losses are scaled and gradients clipped outside of the engine, in which both are switched off.
"""

from __future__ import annotations

import copy
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.bigmodel.safetensors_reader import open_safetensors
from accel_nb.checkpoint.encoding import Slice
from accel_nb.checkpoint.full_tensors import gather_weights
from accel_nb.checkpoint.load import StoredTensor, materialize
from accel_nb.config.deepspeed_settings import settings_for
from accel_nb.config.sections import DeepspeedOptions
from accel_nb.errors import MisuseError
from accel_nb.precision.forward import forward_in_precision
from accel_nb.precision.policy import Precision
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.process.environment import patch_environment, set_local_rank
from accel_nb.runtime.process.user_code import is_of_other_library
from accel_nb.runtime.tensors.instance_patching import (
    patch_instance,
    plain_class,
    replace_forward,
    restore_forward,
    without_class_check,
)
from accel_nb.runtime.tensors.state_tree import map_state
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.runtime.tensors.transforms import is_in_transform
from accel_nb.runtime.world import World
from accel_nb.strategies.base import (
    NO_GRAPH,
    Bundle,
    Capabilities,
    OnReplaced,
    Refusal,
    StepOutcome,
    Stepping,
    copy_state,
    multiply_tensors,
)
from accel_nb.strategies.deepspeed.inner_optimizer import replacing_update
from accel_nb.strategies.deepspeed.limits import STEPPED_DTYPE, find_refusals, models_stepped_by
from accel_nb.strategies.deepspeed.local_gradients import LocalGradients
from accel_nb.strategies.deepspeed.old_storages import replaced_storages, storages_of, storages_without_layouts
from accel_nb.strategies.fsdp.meta_weights import WeightFilling

if TYPE_CHECKING:
    from accel_nb.strategies.deepspeed.engine import ZeroModel


def _why_no_deepspeed() -> str | None:
    if find_spec("deepspeed") is not None:
        return None
    return (
        "it needs the package deepspeed, which is not installed: pip install 'accel_nb[deepspeed]', or use "
        "--strategy fsdp, which shards the same tensors"
    )


class Deepspeed(Stepping):
    """Training with optimizer state, gradients or parameters sharded among the ranks by DeepSpeed."""

    options: DeepspeedOptions
    name: ClassVar[str] = "deepspeed"
    capabilities: ClassVar[Capabilities] = Capabilities(
        min_world=2, priority=30, shards_params=True, overrides_step=True, supports_local_gradients=False,
        holds_gradients=True, stepped_dtype=STEPPED_DTYPE, problem=_why_no_deepspeed,
    )  # fmt: skip

    def __init__(self, options: DeepspeedOptions | None, precision: Precision) -> None:
        super().__init__(options or DeepspeedOptions(), precision)
        self._prepared: dict[int, nn.Module] = {}
        # For models on the meta device: the source of their values, until the models are sharded.
        self._fillings: dict[int, WeightFilling] = {}
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        # By the optimizer's id, in the order of `wrap`, which is the same on every rank.
        self._engines: dict[int, ZeroModel] = {}
        self._scaled: dict[int, Any] = {}
        self._on_replaced: OnReplaced = lambda *_: None
        # Whether a backward pass has kept its graph for another one.
        self._has_retained = False
        # Whether gradients remain when models are released.
        self._keeps_gradients = False
        # Gradients of the parameters of models that no optimizer steps, which DeepSpeed does not average.
        self._other_gradients = LocalGradients()

    def open(self, world: World, comm: Communicator) -> None:
        """Open the strategy in a world; its default process group must be open."""
        self._world, self._comm, self._device = world, comm, torch.device(world.device)
        set_local_rank(world)  # DeepSpeed reads LOCAL_RANK when it starts, and in stage 3 in forward passes
        # With this variable set, DeepSpeed does not warn about the accelerator that it detects.
        with patch_environment(ds_accelerator=self._device.type):
            from accel_nb.strategies.deepspeed.process_setup import use_default_group

            use_default_group(self._device)

    def model_init(self) -> AbstractContextManager[Any]:
        """Return a context in which models are built on the meta device if ``deepspeed.weights`` is set."""
        return nullcontext() if self.options.weights is None else torch.device("meta")

    def wrap(self, bundle: Bundle) -> Bundle:
        """Prepare models and optimizers; parameters are sharded once their model and optimizer are prepared."""
        refused = self.refusal(bundle)
        if refused is not None:
            raise MisuseError(str(refused))
        earlier = dict(self._optimizers)
        try:
            for model in bundle.models:
                if id(model) not in self._prepared:
                    self._prepared[id(model)] = model
                    self._prepare(model)
            self._optimizers.update({id(optimizer): weakref.ref(optimizer) for optimizer in bundle.optimizers})
            for optimizer in self._unsharded():
                self._shard(optimizer)
        except BaseException:
            self._optimizers = earlier
            raise
        return bundle

    def refusal(self, bundle: Bundle) -> Refusal | None:
        """Return the reason if models and optimizers cannot be sharded together, or with prepared ones.

        None if they can.
        """
        models = [model for model in bundle.models if id(model) not in self._prepared]
        waiting = self._unsharded()
        new = [item for item in bundle.optimizers if id(item) not in {*self._engines, *map(id, waiting)}]
        with_engine = [engine.optimizer for engine in self._engines.values()]
        return next(find_refusals(self.options, models, [*waiting, *new], self._prepared.values(), with_engine), None)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Restore a model, and the models that share its optimizer, in full on every rank; every rank must call."""
        if self._prepared.pop(id(model), None) is None:
            return model
        self._fillings.pop(id(model), None)
        for key, engine in list(self._engines.items()):
            if any(model is wrapped for wrapped in engine.models):
                del self._engines[key]
                self._scaled.pop(key, None)
                parameters = [value for wrapped in engine.models for value in wrapped.parameters()]
                old_storages = {} if engine.shards_weights else storages_of(parameters)
                engine.undo(keeps_gradients=self._keeps_gradients)
                for wrapped in engine.models:
                    self._adapt(wrapped)
                self._on_replaced({id(value): value for value in parameters}, old_storages)
        _restore_plain_class(model)
        return model

    def prepare_for_plain_cells(self) -> None:
        """Keep the gradients when a model is unwrapped, as plain cells expect."""
        self._keeps_gradients = True

    def set_on_replaced(self, call: OnReplaced) -> None:
        """Call a function after each replacement of the memory of parameters, which remain the same objects."""
        self._on_replaced = call

    def data_coords(self) -> tuple[int, int]:
        """Return rank and world size: each rank reads its own share of the data."""
        return self._world.rank, self._world.size

    def grad_sync(self, model: nn.Module, enabled: bool) -> None:
        """Do nothing: stage 1 averages once per window, before the step; stages 2 and 3 in every backward pass."""

    def keep_local(self, model: nn.Module, enabled: bool) -> None:
        """Raise `MisuseError`: gradients are sharded among the ranks."""
        raise MisuseError(
            "gradients cannot stay on each rank under the strategy 'deepspeed', whose ranks hold shards: use ddp"
        )

    def backward(
        self,
        loss: Tensor,
        bundle: Bundle,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Compute gradients of the scaled loss.

        Raises `MisuseError` with ``create_graph`` unless ``inputs`` are given: gradients of weights have no graph.
        """
        if create_graph:
            if inputs is None and self._engines:
                raise MisuseError(NO_GRAPH)
            self.check_graph_can_be_kept()
        engines = list(self._engines.values())
        self._other_gradients.are_averaged = False
        for engine in engines:
            engine.begin_backward()
        with ExitStack() as stack:
            for engine in engines:
                stack.enter_context(engine.passes.running())
            self._run_backward(self.precision.scale(loss), retain_graph, create_graph, inputs)
        for engine, is_reached in zip(engines, self._reached(engines), strict=True):
            engine.end_backward(is_reached=is_reached)

    def _run_backward(
        self, loss: Tensor, retain_graph: bool | None, create_graph: bool, inputs: Sequence[Tensor] | None
    ) -> None:
        try:
            torch.autograd.backward(loss, None, retain_graph, create_graph, inputs=inputs)
        except RuntimeError as error:
            if self._has_retained and self.options.zero_stage == 3:
                raise MisuseError(_RELEASED) from error
            raise
        self._has_retained |= bool(retain_graph)

    def _reached(self, engines: list[ZeroModel]) -> list[bool]:
        """Return for each engine whether any rank has new gradients; with one engine that is certain."""
        if len(engines) == 1:
            return [True]
        own = torch.tensor([float(engine.is_reached) for engine in engines], device=self._device)
        return [bool(flag) for flag in self._comm.all_reduce(own, "max").tolist()]

    def finish_gradients(self, bundle: Bundle, factor: float | Tensor) -> None:
        """Average the gradients that are not averaged yet, and multiply all by ``factor``."""
        for engine in self._engines_of(bundle):
            engine.finish_gradients(factor)

    def drop_gradients(self, bundle: Bundle) -> None:
        """Drop the gradients of the bundle's optimizers."""
        for engine in self._engines_of(bundle):
            engine.drop_gradients()

    def zero_gradients(self, bundle: Bundle) -> None:
        """Set the gradients of the bundle's optimizers to zero."""
        for engine in self._engines_of(bundle):
            engine.zero_gradients()

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients."""
        return any(engine.has_gradients for engine in self._engines.values())

    @property
    def has_incomplete_gradients(self) -> bool:
        """Whether there are gradients that are not averaged yet."""
        return any(engine.has_incomplete_gradients for engine in self._engines.values())

    def apply_gradient_writes(self) -> None:
        """Write changes that code has made to gathered gradients into the shards; every rank must call."""
        self._average_others()
        for engine in self._engines.values():
            engine.apply_gradient_writes()

    def _average_others(self) -> None:
        """Average the gradients of parameters that no optimizer steps; every rank must call."""
        self._other_gradients.average(self._comm, self._others())

    def _others(self) -> list[nn.Parameter]:
        """Return the parameters of models that no optimizer steps, but that require gradients."""
        parameters = [value for model in self._prepared.values() for value in model.parameters() if value.requires_grad]
        stepped = {id(value) for value in parameters for engine in self._engines.values() if engine.steps(value)}
        return list({id(value): value for value in parameters if id(value) not in stepped}.values())

    def is_gathered(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter that stage 3 holds whole for a pass, or that is stepped as a copy."""
        return any(engine.detects_writes_by_version(tensor) for engine in self._engines.values())

    def check_graph_can_be_kept(self) -> None:
        """Raise `MisuseError` in stage 3, whose graph has parameters that are empty again after the forward pass."""
        if self.options.zero_stage == 3 and self._engines:
            raise MisuseError(
                "gradients of gradients need the parameters after the forward pass, when ZeRO stage 3 has released "
                "them: train with --zero-stage 2, or with --strategy fsdp"
            )

    def read_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the full gradient of a parameter, gathered; changes of it have effect. Every rank must call."""
        engine = next((engine for engine in self._engines.values() if engine.steps(parameter)), None)
        if engine is not None:
            return engine.read_gradient(parameter)
        self._average_others()
        return parameter.grad

    def write_gradient(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace the whole gradient of a parameter, or drop it."""
        engine = next((engine for engine in self._engines.values() if engine.steps(parameter)), None)
        if engine is not None:
            engine.write_gradient(parameter, value)
        else:
            parameter.grad = value

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, once per step, and report an overflow to all ranks."""
        engine = self._engines.get(id(optimizer))
        if engine is not None and self.precision.policy.loss_scaling and engine.has_gradients:
            scaled = self._scaled.setdefault(id(optimizer), _OptimizerForScaler(engine))
            scaled.share_overflow(self._comm, self._device)
            self.precision.unscale_(scaled)

    @torch.no_grad()
    def clip_grad_norm(
        self, bundle: Bundle, max_norm: float, norm_type: float, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Clip to ``max_norm`` and return the norm over all shards before clipping."""
        others = self._other_chosen(parameters)
        chosen = list(self._chosen(bundle, parameters))
        own = torch.zeros((), device=self._device)
        counted = [*chosen, *others] if self._world.is_main else chosen  # all ranks have the others
        if counted:
            own = torch.nn.utils.get_total_norm(counted, norm_type).to(self._device)
        if math.isinf(norm_type):
            total = self._comm.all_reduce(own, "max")
        else:
            total = self._comm.all_reduce(own**norm_type) ** (1.0 / norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        multiply_tensors((*chosen, *others), scale)
        return total

    @torch.no_grad()
    def clip_grad_value(self, bundle: Bundle, clip_value: float, parameters: Iterable[Tensor]) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``."""
        parameters = list(parameters)
        for gradient in (*self._chosen(bundle, parameters), *self._other_chosen(parameters)):
            gradient.clamp_(-clip_value, clip_value)

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step this rank's shard of the parameters, and gather the result if weights are not sharded."""
        engine = self._engines.get(id(optimizer))
        if engine is None:
            return super().step(optimizer)
        if not self.precision.policy.loss_scaling or not engine.has_gradients:
            optimizer.step()
            return "skipped" if engine.has_overflowed else "ran"
        self.unscale(optimizer)
        scaled = self._scaled[id(optimizer)]
        ran = self.precision.step(scaled) and not engine.has_overflowed
        if not ran:
            engine.drop_gradients()
        return "ran" if ran else "skipped"

    def run_step(self, optimizer: Optimizer, step: Callable[[], Any], *, has_closure: bool) -> Any:
        """Call ``step``, with its hooks and its closure, and step this rank's shard in place of the parameters."""
        engine = self._engines.get(id(optimizer))
        if engine is None:
            return step()
        with replacing_update(optimizer, engine.step):
            return step()

    def complete_state(self) -> None:
        """Copy changes that code has made to tensors of state dicts into the weights; every rank must call."""
        for engine in self._engines.values():
            engine.apply_weight_writes()

    def read_state(self, bundle: Bundle, *, copied: bool = True) -> dict[str, Any]:
        """Return all training state; of each sharded tensor this rank's rows, as a `Slice`."""
        for engine in self._engines_of(bundle):
            engine.reload_changed_weights()
        weights = [model.state_dict(keep_vars=True) for model in bundle.models]
        with sharded.no_collective_reads():
            optimizers = [optimizer.state_dict() for optimizer in bundle.optimizers]
        return {
            "models": [self._sliced(values, copied) for values in weights],
            "optimizers": [self._sliced(values, copied) for values in optimizers],
            "schedulers": [self._sliced(scheduler.state_dict(), copied) for scheduler in bundle.schedulers],
            "precision": self.precision.state_dict(),
        }

    @torch.no_grad()
    def write_state(self, bundle: Bundle, state: Mapping[str, Any]) -> None:
        """Load state; stored tensors are read and sharded one at a time."""
        for model, values in zip(bundle.models, state["models"], strict=True):
            named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
            named.update(model.named_buffers(remove_duplicate=False))
            for name, value in values.items():
                if name in named:
                    sharded.copy_into(named[name], self._whole(value))
            extra = {name: materialize(value) for name, value in values.items() if name not in named}
            if extra:
                plain_class(model).load_state_dict(model, extra, strict=False)
        for engine in self._engines_of(bundle):
            engine.reload_changed_weights()
        for optimizer, values in zip(bundle.optimizers, state["optimizers"], strict=True):
            rest = materialize({key: value for key, value in values.items() if key != "state"})
            engine = self._engines.get(id(optimizer))
            if engine is None:
                own = materialize(values["state"])
                optimizer.load_state_dict(copy_state({**rest, "state": own}))
                continue
            optimizer.load_state_dict(copy_state({**rest, "state": {}}))
            parameters = stepped_parameters(optimizer)
            engine.load_optimizer({parameters[key]: kept for key, kept in values["state"].items()}, self._whole)
        for scheduler, values in zip(bundle.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copy_state(materialize(values)))
        self.precision.load_state_dict(state["precision"])

    def bytes_outside_of_grad(self) -> tuple[int, int]:
        """Return the bytes of this rank's gradients, and of the copies of weights that it steps."""
        engines = self._engines.values()
        return sum(engine.gradient_bytes for engine in engines), sum(engine.master_bytes for engine in engines)

    def describe(self) -> dict[str, Any]:
        """Return the stage, and the options that differ from their defaults."""
        return {"zero_stage": self.options.zero_stage, **self.options.model_dump(mode="json", exclude_defaults=True)}

    def settings(self) -> list[dict[str, Any]]:
        """Return the configuration of each DeepSpeed engine."""
        return [engine.settings for engine in self._engines.values()]

    def close(self) -> None:
        """Restore every model."""
        for model in list(self._prepared.values()):
            self.unwrap(model)

    def _prepare(self, model: nn.Module) -> None:
        """Copy rank 0's weights to a model and set the run's precision, before its optimizer is prepared."""
        if any(value.is_meta for value in model.parameters()):
            assert self.options.weights is not None, "`find_refusals` refuses models without values otherwise"
            filling = self._fillings[id(model)] = WeightFilling(model, open_safetensors(self.options.weights))
            filling.fill_whole(self._device)
        for value in (*model.parameters(), *model.buffers()):
            if not value.is_meta and value.layout is torch.strided:  # sparse buffers stay as they are, as under ddp
                self._comm.broadcast(value.data)
        self._adapt(model)

    def _adapt(self, model: nn.Module) -> None:
        """Override the methods of a model that its engine changes, and set the run's precision."""
        _restore_plain_class(model)
        engine = next(
            (engine for engine in self._engines.values() if any(model is wrapped for wrapped in engine.models)), None
        )
        if engine is not None:  # all engines of one model need the same methods
            patch_instance(model, _methods_over(plain_class(model), engine))
        if self.precision.policy.compute is not None:
            replace_forward(model, forward_in_precision(model, self.precision))

    def _unsharded(self) -> list[Optimizer]:
        """Return the optimizers that have no engine, since none of their models is prepared yet."""
        living = [optimizer for held in self._optimizers.values() if (optimizer := held()) is not None]
        return [optimizer for optimizer in living if id(optimizer) not in self._engines]

    def _shard(self, optimizer: Optimizer) -> None:
        models, owned = models_stepped_by(optimizer, self._prepared.values())
        if not models:
            return
        from accel_nb.strategies.deepspeed.engine import ZeroModel

        for model in models:
            _restore_plain_class(model)
        trained = {id(value): value for value in stepped_parameters(optimizer)}
        count = sum(value.numel() for key, value in trained.items() if key in owned)
        settings = settings_for(self.options, count, pins_memory=device_type(self._device).pins_memory)
        fillings = [self._fillings.pop(id(model)) for model in models if id(model) in self._fillings]
        old_storages = storages_of(value for model in models for value in model.parameters())
        engine = self._engines[id(optimizer)] = ZeroModel(models, optimizer, settings, self._comm, fillings)
        for model in models:
            self._adapt(model)
        # No parameter is another object; their data is now in other storages.
        self._on_replaced(
            {}, storages_without_layouts(old_storages) if engine.shards_weights else replaced_storages(old_storages)
        )

    def _engines_of(self, bundle: Bundle) -> Iterator[ZeroModel]:
        for optimizer in bundle.optimizers:
            engine = self._engines.get(id(optimizer))
            if engine is not None:
                yield engine

    def _chosen(self, bundle: Bundle, parameters: Iterable[Tensor] | None) -> Iterator[Tensor]:
        """Yield this rank's shard of the gradient of each of ``parameters``; None means all."""
        wanted = None if parameters is None else {id(value) for value in parameters}
        for optimizer in bundle.optimizers:
            engine = self._engines.get(id(optimizer))
            if engine is None:
                continue
            self.unscale(optimizer)
            for parameter, gradient in engine.gradients():
                if gradient.numel() and (wanted is None or id(parameter) in wanted):
                    yield gradient

    def _other_chosen(self, parameters: Iterable[Tensor] | None) -> list[Tensor]:
        """Return the averaged gradients of the ``parameters`` that no optimizer steps; every rank must call."""
        wanted = set() if parameters is None else {id(value) for value in parameters}
        others = [value for value in self._others() if id(value) in wanted]
        if not others:
            return []
        self._average_others()
        return [value.grad for value in others if value.grad is not None]

    def _whole(self, value: Any) -> Any:
        """Return the full tensor of a `Slice`, a stored tensor or a sharded tensor; every rank must call."""
        if isinstance(value, Slice):
            return dict(gather_weights({"": value}, self._comm))[""]
        if isinstance(value, StoredTensor):
            return value.read()
        return sharded.gather_full(value, self._comm) if sharded.is_sharded(value) else value

    def _sliced(self, state: Any, copied: bool) -> Any:
        """Return a state in which each sharded tensor is replaced by a `Slice` of this rank's rows."""

        def slice_leaf(leaf: Any) -> Any:
            if sharded.is_sharded(leaf):
                whole = sharded.gather_full(leaf, self._comm)
                if not whole.dim():
                    return whole
                rows = -(-whole.shape[0] // self._world.size)
                start = min(rows * self._world.rank, whole.shape[0])
                shard = whole[start : start + rows].clone()
                return Slice(shard, (start, *(0 for _ in whole.shape[1:])), tuple(whole.shape))
            if isinstance(leaf, Tensor):
                return leaf.detach().clone() if copied else leaf.detach()
            return leaf

        return map_state(slice_leaf, state)


class _OptimizerForScaler:
    """A sharded optimizer for torch's gradient scaler: this rank's gradients, and whether any rank's overflowed."""

    def __init__(self, engine: ZeroModel) -> None:
        self._engine = engine
        self._found = torch.zeros(1, device="cpu")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group of tensors whose ``grad`` is this rank's gradients."""
        return [{"params": [_with_grad(value) for value in (self._found, *self._gradients())]}]

    def share_overflow(self, comm: Communicator, device: torch.device) -> None:
        """Record whether any rank has an infinite or NaN gradient; every rank must call."""
        finite = all(bool(value.isfinite().all()) for value in self._gradients())
        seen = comm.all_reduce(torch.tensor([0.0 if finite else 1.0], device=device), "max")
        self._found = torch.where(seen > 0, math.inf, 0.0)

    def step(self) -> None:
        """Step the optimizer; the scaler calls it if no gradient overflowed."""
        self._engine.optimizer.step()

    def _gradients(self) -> Iterator[Tensor]:
        return (value for _, value in self._engine.gradients() if value.numel())


_RELEASED = (
    "a backward pass has failed, and an earlier one has kept its graph (retain_graph=True), in which ZeRO stage 3 has "
    "released the parameters: add the losses up for one backward pass, or train with --zero-stage 2 or --strategy fsdp"
)


def _with_grad(gradient: Tensor) -> Tensor:
    holder = gradient.detach()
    holder.grad = gradient
    return holder


def _restore_plain_class(model: nn.Module) -> None:
    while plain_class(model) is not type(model):
        restore_forward(model)


def _separate(model: nn.Module, state: dict[str, Any]) -> None:
    """Replace the parameters of a state dict by copies, since libraries read which of them are in the same memory.

    DeepSpeed has put all of them into the memory of one flat tensor. Names of one parameter have the same copy.
    """
    copies: dict[int, Tensor] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if name in state:
            copies.setdefault(id(value), value.detach().clone())
            state[name] = copies[id(value)]


def _methods_over(plain: Any, engine: ZeroModel) -> dict[str, Callable[..., Any]]:
    """Return the methods of a sharded module that differ from its plain class."""

    def state_dict(self: Any, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the full parameters where all ranks gather, as in a plain cell; raise `MisuseError` elsewhere.

        Between steps a sharded parameter is empty, and would be saved empty. ``keep_vars`` returns them unchanged.
        """
        engine.apply_weight_writes()
        state = plain.state_dict(self, destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name, value in self.named_parameters(prefix.rstrip("."), remove_duplicate=False):
            if sharded.is_sharded(value) and not keep_vars:
                state[name] = sharded.full_tensor(value)
                engine.states.add(value, state[name])
        caller = sys._getframe(1).f_globals.get("__name__")
        if destination is None and not keep_vars and not engine.shards_weights and is_of_other_library(caller):
            _separate(self, state)
        return state

    def load_state_dict(self: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors; each rank uses its shard."""
        if assign:
            raise MisuseError("load_state_dict(assign=True) would replace sharded parameters: call it without assign")
        with engine.whole():
            return plain.load_state_dict(self, state_dict, strict)

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        memo[id(self)] = copied = copy.deepcopy(engine.copy_model(self, is_whole=True), memo)
        return copied

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_in_transform():
            raise MisuseError(
                f"torch.func transforms a call of a {plain.__name__}, in which ZeRO stage 3 cannot gather parameters: "
                "train with --zero-stage 2, or with --strategy fsdp"
            )
        engine.reload_changed_weights()  # so that values written into weights take effect before the forward pass
        with engine.passes.running(), engine.without_writes():
            return plain.__call__(self, *args, **kwargs)

    more = {"__call__": __call__} if engine.shards_weights else {}
    return {
        **more,
        "__reduce_ex__": lambda self, protocol: engine.copy_model(self, is_whole=True).__reduce_ex__(protocol),
        "_accel_nb_reduce": lambda self, protocol=5: without_class_check(
            engine.copy_model(self).__reduce_ex__(protocol)
        ),
        "__copy__": lambda self: engine.copy_model(self, is_whole=True),
        "__deepcopy__": __deepcopy__,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
    }
