"""PyTorch's `fully_shard`: each rank holds a part of every parameter, its gradient and its optimizer state.

Parameters are gathered one unit at a time, just before it computes, and let go of after it; gradients are averaged and
divided as they come. An optimizer stays the object that it is: it is given the divided parameters in place of its own.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.optim import Optimizer

from accel_nb.bigmodel.safetensors_reader import open_checkpoint
from accel_nb.checkpoint.encoding import Slice
from accel_nb.checkpoint.layout import Region
from accel_nb.checkpoint.load import StoredTensor, materialise
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.precision.policy import Precision
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.world import World
from accel_nb.strategies.base import Bundle, Capabilities, Refusal, Stepping, copied_state, multiply, multiply_gradients
from accel_nb.strategies.fsdp.sharded_model import ShardedModel, refusal_of, repoint
from accel_nb.strategies.fsdp.wrap_policy import Wrap, units_of
from accel_nb.strategies.instance_patching import give_forward, plain_forward, take_forward_back


class FsdpOptions(Protocol):
    """The section of the configuration that this strategy reads."""

    @property
    def wrap(self) -> Wrap:
        """What is gathered at a time."""
        ...

    @property
    def min_params(self) -> int:
        """How many parameters a unit has by size."""
        ...

    @property
    def classes(self) -> Sequence[str]:
        """Class names of units."""
        ...

    @property
    def reshard_after_forward(self) -> bool:
        """Let go of a unit's parameters between forward and backward."""
        ...

    @property
    def hybrid_shard_size(self) -> int | None:
        """How many ranks share one copy of the model; None: all."""
        ...

    @property
    def cpu_offload(self) -> bool:
        """Keep the parts in host memory."""
        ...

    @property
    def autocast(self) -> bool:
        """Apply the run's precision as on one device."""
        ...

    @property
    def reduce_dtype(self) -> Literal["fp32", "compute"]:
        """What gradients are averaged in."""
        ...

    @property
    def float8_gather(self) -> bool:
        """Gather the weights of float8 layers in float8."""
        ...

    @property
    def average_unused(self) -> bool:
        """Count parameters that took no part on a rank as zero gradients there."""
        ...

    @property
    def weights(self) -> str | None:
        """Safetensors that models on the meta device are filled from."""
        ...

    @property
    def forward_methods(self) -> Sequence[str]:
        """Methods other than forward that compute with a model's parameters."""
        ...


@dataclass(frozen=True, slots=True)
class DefaultFsdpOptions:
    """The defaults, for use without a configuration."""

    wrap: Wrap = "blocks"
    min_params: int = 1_000_000
    classes: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    hybrid_shard_size: int | None = None
    cpu_offload: bool = False
    autocast: bool = False
    reduce_dtype: Literal["fp32", "compute"] = "fp32"
    float8_gather: bool = False
    average_unused: bool = False
    weights: str | None = None
    forward_methods: tuple[str, ...] = ()


class Fsdp(Stepping):
    """Trains one model that is divided among the ranks; see the module."""

    name: ClassVar[str] = "fsdp"
    capabilities: ClassVar[Capabilities] = Capabilities(min_world=2, rank=40, shards_params=True, keeps_local=False)

    def __init__(self, options: FsdpOptions | None, precision: Precision) -> None:
        super().__init__(options or DefaultFsdpOptions(), precision)
        self._models: dict[int, ShardedModel] = {}
        # In the order in which they came, which is the same on every rank.
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._mesh: Any = None

    def open(self, world: World, comm: Communicator) -> None:
        """Enter the world; its default process group must be open."""
        self._world = world
        self._comm = comm
        self._device = torch.device(world.device)
        size = self.options.hybrid_shard_size or world.size
        if world.size % size:
            raise ConfigError(
                f"fsdp.hybrid_shard_size is {size}, which does not divide the {world.size} workers; "
                f"use one of {', '.join(str(n) for n in range(1, world.size + 1) if world.size % n == 0)}"
            )
        self._num_replicas = world.size // size

    def model_init(self) -> AbstractContextManager[Any]:
        """Return a context in which models are built without memory, if there are weights to fill them from."""
        return nullcontext() if self.options.weights is None else torch.device("meta")

    def refusal(self, bundle: Bundle) -> Refusal | None:
        """Say why a model cannot be divided, or not in this way."""
        if self.options.float8_gather and self.options.cpu_offload:
            why = "what lies in host memory is gathered in the format of the computation, and not in float8"
            return Refusal(why, "leave out one of fsdp.float8_gather and fsdp.cpu_offload")
        if self.options.average_unused and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            why = f"fsdp.average_unused needs a newer PyTorch than {torch.__version__}"
            return Refusal(why, "leave the option out, or install PyTorch 2.13 or newer")
        new = (model for model in bundle.models if id(model) not in self._models)
        return next(filter(None, (refusal_of(model, self.options.weights) for model in new)), None)

    def wrap(self, bundle: Bundle) -> Bundle:
        """Divide every model that has parameters, and let the optimizers step the parts."""
        refused = self.refusal(bundle)
        if refused is not None:
            raise MisuseError(str(refused))
        new = [
            model for model in bundle.models if id(model) not in self._models and any(True for _ in model.parameters())
        ]
        made: list[ShardedModel] = []
        known = {id(optimizer) for optimizer in self._living()}
        optimizers = [item for item in bundle.optimizers if id(item) not in known]
        stepped = [(item, _stepped_by(item)) for item in (*self._living(), *optimizers)]
        try:
            for model in new:
                made.append(self._divide(model))
                self._adapt(made[-1])
            changed = {key: new for part in (*self._models.values(), *made) for key, new in part.changed.items()}
            for optimizer, _ in stepped:
                repoint(optimizer, changed, _divided)
            self._comm.barrier()  # until here an error on any rank leaves all of them with whole models
        except BaseException:
            for optimizer, before in stepped:
                _step_again(optimizer, before)
            for part in reversed(made):
                self._adapt_no_more(part)
                part.abandon()
            raise
        for part in made:
            part.commit()
            self._models[id(part.model)] = part
        self._optimizers += [weakref.ref(item) for item in optimizers]
        return bundle

    def _divide(self, model: nn.Module) -> ShardedModel:
        options = self.options
        units = units_of(model, options.wrap, options.min_params, options.classes)
        missing = [name for name in options.forward_methods if not callable(getattr(model, name, None))]
        if missing:
            raise ConfigError(f"fsdp.forward_methods names {missing[0]}, which a {type(model).__name__} lacks")
        weights = None
        if options.weights is not None and any(value.is_meta for value in (*model.parameters(), *model.buffers())):
            weights = open_checkpoint(options.weights)
        settings = self._settings_for(model)
        return ShardedModel(model, units, self._comm, self._device, *settings, weights, float8=options.float8_gather)

    def _adapt(self, part: ShardedModel) -> None:
        """Register a divided model's other forward methods, and set its precision, as the options say."""
        options, model = self.options, part.model
        root: Any = model
        for name in options.forward_methods:
            register_fsdp_forward_method(model, name)
            if part.float8:
                setattr(model, name, part.float8.wrapped(getattr(model, name)))
        if options.average_unused:
            root.set_reduce_scatter_unused_params(True)
        if options.autocast and self.precision.policy.compute is not None:
            give_forward(model, plain_forward(model, self.precision))

    def _adapt_no_more(self, part: ShardedModel) -> None:
        for name in self.options.forward_methods:
            vars(part.model).pop(name, None)
        if self.options.autocast and self.precision.policy.compute is not None:
            take_forward_back(part.model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Make a model whole on every rank, and its optimizers' state; every rank must call."""
        part = self._models.pop(id(model), None)
        if part is None:
            return model
        self._adapt_no_more(part)
        part.average_pending()
        back = part.undo()
        for optimizer in self._living():
            repoint(optimizer, back, lambda new, value: self._whole(value))
        return model

    def data_coords(self) -> tuple[int, int]:
        """Return rank and size: each rank reads a share of its own."""
        return self._world.rank, self._world.size

    def grad_sync(self, model: nn.Module, enabled: bool) -> None:
        """Say whether the next backward pass averages the model's gradients."""
        part = self._models.get(id(model))
        if part is not None:
            part.sync(enabled)

    def keep_local(self, model: nn.Module, enabled: bool) -> None:
        """Refuse: a gradient is divided among the ranks as it comes."""
        raise MisuseError(
            "gradients cannot stay on each rank under the strategy 'fsdp', whose ranks hold a part of each: use ddp"
        )

    def backward(
        self, loss: Tensor, bundle: Bundle, *, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Compute gradients of the scaled loss; they are averaged and divided on the way."""
        for part in self._models.values():
            part.is_pending = part.is_pending or not part.syncs
        torch.autograd.backward(self.precision.scale(loss), None, retain_graph, create_graph)

    def finish_gradients(self, bundle: Bundle, factor: float | Tensor) -> None:
        """Average what was not averaged in a backward pass, and multiply all by ``factor``."""
        groups = [group for optimizer in bundle.optimizers for group in optimizer.param_groups]
        owned = {id(value) for group in groups for value in group["params"]}
        for part in self._models.values():
            part.average_pending()
            for value in part.replicated:
                if id(value) in owned and value.requires_grad:
                    value.grad = torch.zeros_like(value) if value.grad is None else value.grad
                    self._comm.all_reduce(value.grad, "mean")
        multiply_gradients(bundle, factor)

    def drop_gradients(self, bundle: Bundle) -> None:
        """Forget gradients, those of whole parameters that wait on each rank included."""
        super().drop_gradients(bundle)
        for part in self._models.values():
            part.drop_pending()

    @torch.no_grad()
    def clip_grad_norm(
        self, bundle: Bundle, max_norm: float, norm_type: float, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Clip to ``max_norm`` and return the norm over all parts, before clipping; one message of one number."""
        for optimizer in bundle.optimizers:
            self.precision.unscale_(optimizer)
        clipped = list(bundle.parameters()) if parameters is None else list(parameters)
        gradients = [value.grad for value in clipped if value.grad is not None]
        parts = [sharded.local(gradient) for gradient in gradients if sharded.is_sharded(gradient)]
        whole = [gradient for gradient in gradients if not sharded.is_sharded(gradient)]
        own = self._norm([part for part in parts if part.numel()], norm_type)
        same = self._norm(whole, norm_type)
        if math.isinf(norm_type):
            total = torch.maximum(self._comm.all_reduce(own, "max"), same)
        else:
            power = self._comm.all_reduce(own**norm_type) / self._num_replicas + same**norm_type
            total = power ** (1.0 / norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        multiply((*parts, *whole), scale)
        return total

    def read_state(self, bundle: Bundle, *, copied: bool = True) -> dict[str, Any]:
        """Return all training state, a `Slice` for each tensor of which this rank holds a part."""
        for model in bundle.models:
            part = self._models.get(id(model))
            if part is not None:
                part.average_pending()
        with sharded.apart():
            weights = [model.state_dict() for model in bundle.models]
        return {
            "models": [_sliced(values, copied) for values in weights],
            "optimizers": [_sliced(optimizer.state_dict(), copied) for optimizer in bundle.optimizers],
            "schedulers": [_sliced(scheduler.state_dict(), copied) for scheduler in bundle.schedulers],
            "precision": self.precision.state_dict(),
        }

    def write_state(self, bundle: Bundle, state: Mapping[str, Any]) -> None:
        """Load state back: of tensors that are whole, or not read yet, this rank takes its part only."""
        for model, values in zip(bundle.models, state["models"], strict=True):
            model.load_state_dict(_placed(values, dict(model.named_parameters(remove_duplicate=False))))
        for optimizer, values in zip(bundle.optimizers, state["optimizers"], strict=True):
            parameters = [value for group in optimizer.param_groups for value in group["params"]]
            own = {key: _placed(kept, dict.fromkeys(kept, parameters[key])) for key, kept in values["state"].items()}
            rest = materialise({key: value for key, value in values.items() if key != "state"})
            optimizer.load_state_dict(copied_state({**rest, "state": own}))
        for scheduler, values in zip(bundle.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copied_state(materialise(values)))
        self.precision.load_state_dict(state["precision"])

    def describe(self) -> dict[str, Any]:
        """Return into how many units the models are divided, what weights are kept in, and options that were chosen."""
        parts = list(self._models.values())
        facts: dict[str, Any] = {"units": sum(part.num_units for part in parts)} if parts else {}
        if self.precision.policy.compute is not None and parts:
            kept = {value.dtype for part in parts for value in part.model.parameters() if value.requires_grad}
            facts["weights"] = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in kept))
        defaults = DefaultFsdpOptions()
        for name in DefaultFsdpOptions.__dataclass_fields__:
            value = getattr(self.options, name)
            if value != getattr(defaults, name):
                facts[name] = list(value) if isinstance(value, tuple) else value
        if self.options.float8_gather and parts:
            facts["float8_gather"] = f"of {sum(len(part.float8 or ()) for part in parts)} weights"
        return facts

    def close(self) -> None:
        """Make every model whole."""
        for part in list(self._models.values()):
            self.unwrap(part.model)

    def _living(self) -> list[Optimizer]:
        self._optimizers = [held for held in self._optimizers if held() is not None]
        return [optimizer for held in self._optimizers if (optimizer := held()) is not None]

    def _whole(self, value: Tensor) -> Tensor:
        return sharded.gather(value, self._comm) if sharded.is_sharded(value) else value

    def _norm(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        if not gradients:
            return torch.zeros((), dtype=torch.float32, device=self._device)
        return torch.nn.utils.get_total_norm(gradients, norm_type).to(self._device)

    def _settings_for(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of `fully_shard` for a model's units, and those for the model itself."""
        if self._mesh is None:
            size = self._world.size // self._num_replicas
            shape, names = ((size,), ("shard",))
            if self._num_replicas > 1:
                shape, names = ((self._num_replicas, size), ("replicate", "shard"))
            self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        policy, options = self.precision.policy, self.options
        compute = None if options.autocast else policy.compute
        is_half = compute is not None or any(value.dtype in _HALF for value in model.parameters())
        reduce = torch.float32 if is_half and options.reduce_dtype == "fp32" else None
        settings: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": None if options.reshard_after_forward else False,
            "mp_policy": MixedPrecisionPolicy(compute, reduce),
        }
        if options.cpu_offload:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type(self._device).pins_memory)
        output = policy.output if compute is not None else None
        return settings, {**settings, "mp_policy": MixedPrecisionPolicy(compute, reduce, output)}


_HALF = (torch.bfloat16, torch.float16)


def _divided(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return this rank's part of a tensor that an optimizer keeps beside a parameter."""
    return sharded.divided({"": value}, parameter)[""]


def _sliced(state: Any, copied: bool) -> Any:
    """Return a state with a `Slice` in place of each tensor of which this rank holds a part."""
    if sharded.is_sharded(state):
        part = sharded.local(state).detach()
        offsets = (sharded.start_of(state), *(0 for _ in state.shape[1:]))
        return Slice(part.clone() if copied else part, offsets, tuple(state.shape))
    if isinstance(state, Tensor):
        return state.detach().clone() if copied else state
    if isinstance(state, dict):
        result = type(state)((key, _sliced(value, copied)) for key, value in state.items())
        if hasattr(state, "_metadata"):
            result._metadata = state._metadata  # type: ignore[attr-defined]
        return result
    if type(state) in (list, tuple):
        return type(state)(_sliced(value, copied) for value in state)
    return state


def _stepped_by(optimizer: Optimizer) -> tuple[list[list[nn.Parameter]], dict[Any, Any]]:
    """Return what an optimizer steps, by group, and the state that it has of it."""
    return [list(group["params"]) for group in optimizer.param_groups], dict(optimizer.state)


def _step_again(optimizer: Optimizer, before: tuple[list[list[nn.Parameter]], dict[Any, Any]]) -> None:
    """Restore the groups and the state of an optimizer that `_stepped_by` has returned."""
    groups, state = before
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"][:] = parameters
    optimizer.state.clear()
    optimizer.state.update(state)


def _placed(values: Mapping[str, Any], targets: Mapping[str, Any]) -> Any:
    """Return a state whose tensors are, where their target is sharded, this rank's part of them."""
    result = OrderedDict((name, _placed_one(value, targets.get(name))) for name, value in values.items())
    if hasattr(values, "_metadata"):
        result._metadata = values._metadata  # type: ignore[attr-defined]
    return result


def _placed_one(value: Any, target: Any) -> Any:
    if not sharded.is_sharded(target) or tuple(getattr(value, "shape", ())) != tuple(target.shape):
        return materialise(value)
    held = sharded.local(target)
    if isinstance(value, Slice):
        part = value.tensor
    elif isinstance(value, StoredTensor):
        rest = tuple(target.shape[1:])
        part = value.read(Region((sharded.start_of(target), *(0 for _ in rest)), (held.shape[0], *rest)))
    else:
        part = sharded.own_part(target, value)
    return sharded.like(target, part.to(held.device).clone())
