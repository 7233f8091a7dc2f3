"""PyTorch's `fully_shard`: each rank holds a shard of every parameter, its gradient and its optimizer state.

Parameters are gathered one unit at a time, before the unit computes, and freed after it; gradients are averaged and
divided in the backward pass. Optimizers stay the same objects: their groups get the sharded parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_nb.bigmodel.safetensors_reader import open_safetensors
from accel_nb.checkpoint.load import materialize
from accel_nb.config.sections import FsdpOptions
from accel_nb.errors import AccelNbError, ConfigError, MisuseError
from accel_nb.precision.forward import cast_half_floats, forward_in_precision
from accel_nb.precision.policy import Precision
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.mesh_groups import MeshGroups
from accel_nb.runtime.mesh import DATA_DIMENSIONS, arrange_mesh
from accel_nb.runtime.tensors.instance_patching import replace_forward, restore_forward
from accel_nb.runtime.tensors.module_paths import submodule_at
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.runtime.world import World
from accel_nb.strategies.base import (
    LOST_WRITE,
    NO_GRAPH,
    Bundle,
    Capabilities,
    OnReplaced,
    Refusal,
    ScheduledSteps,
    Stages,
    Stepping,
    copy_state,
    multiply_gradients,
)
from accel_nb.strategies.fsdp.divided_dimensions import DividedDimensions, describe_divided
from accel_nb.strategies.fsdp.local_step import step_on_shards
from accel_nb.strategies.fsdp.model_refusal import find_refusal
from accel_nb.strategies.fsdp.optimizer_parameters import replace_parameters
from accel_nb.strategies.fsdp.sharded_model import ShardedModel
from accel_nb.strategies.fsdp.sharded_state import (
    groups_and_state,
    own_shard_of,
    restore_groups,
    shard_values,
    sliced,
)
from accel_nb.strategies.fsdp.stage_state import ordered_state, share_states
from accel_nb.strategies.fsdp.total_norm import clip_total_norm
from accel_nb.strategies.fsdp.unit_settings import expert_settings, unit_settings
from accel_nb.strategies.fsdp.wrap_policy import choose_units
from accel_nb.strategies.local_gradients import LocalGradients


class Fsdp(Stepping):
    """Trains models whose parameters are sharded over the ranks."""

    options: FsdpOptions
    name: ClassVar[str] = "fsdp"
    capabilities: ClassVar[Capabilities] = Capabilities(
        min_world=2, priority=40, shards_params=True, supports_local_gradients=False, divides_layers=True
    )

    def __init__(self, options: FsdpOptions | None, precision: Precision) -> None:
        super().__init__(options or FsdpOptions(), precision)
        self._models: dict[int, ShardedModel] = {}
        # In the order of `wrap`, which is the same on every rank.
        self._optimizers: list[weakref.ref[Optimizer]] = []
        # By sharded parameter that is no longer in a model: its original. An optimizer may still hold the former.
        self._originals: Any = WeakIdKeyDictionary()
        self._mesh: Any = None
        self._on_replaced: OnReplaced = lambda *_: None
        self._dimensions = DividedDimensions()
        self._hooks: list[Any] = []
        self.groups: MeshGroups | None = None

    def divide_layers(self, size: int, *, replicates: bool) -> None:
        """Divide layers among ``size`` ranks; with ``replicates`` the other ranks hold replicas, else shards."""
        self._dimensions.tp, self._dimensions.replicates = size, replicates

    def divide_stages(self, stages: Stages, *, replicates: bool) -> None:
        """Divide the blocks of models among ranks; with ``replicates`` the other ranks hold replicas, else shards."""
        self._dimensions.stages, self._dimensions.replicates = stages, replicates

    def divide_sequences(self, size: int, *, replicates: bool) -> None:
        """Divide sequences among ``size`` ranks; with ``replicates`` all ranks hold replicas, else shards."""
        self._dimensions.cp, self._dimensions.replicates = size, replicates

    def divide_experts(self, size: int, *, replicates: bool) -> None:
        """Divide experts among ``size`` ranks.

        With ``replicates`` ranks hold replicas of the other parts, else shards.
        """
        self._dimensions.ep, self._dimensions.replicates = size, replicates

    def set_on_replaced(self, call: OnReplaced) -> None:
        """Call a function when parameters are sharded or restored, with the new ones by the ids of the old."""
        self._on_replaced = call

    def open(self, world: World, comm: Communicator) -> None:
        """Set the world and its communicator; the default process group must be open."""
        self._world = world
        self._comm = comm
        self._device = torch.device(world.device)
        dimensions, copies = self._dimensions, self._dimensions.replicates
        degrees = {"pp": dimensions.stages.number, "cp": dimensions.cp, "tp": dimensions.tp, "ep": dimensions.ep}
        shard = 1 if copies else self.options.hybrid_shard_size
        self._place = arrange_mesh(world.rank, world.size, **degrees, shard=shard)
        self._parameter_mesh = self._place.parameter_mesh(copies=copies)
        if dimensions.are_divided:
            self.groups = MeshGroups.open(self._place, world, copies=copies)

    @property
    def device_mesh(self) -> Any:
        """The mesh of all ranks that hold one model; the first read opens its groups, so every rank must read it."""
        if self.groups is not None:
            return self.groups.device_mesh
        if self._mesh is None:
            shape = tuple(getattr(self._parameter_mesh, name) for name in self._data_dimensions)
            self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=self._data_dimensions)
        return self._mesh

    @property
    def _data_dimensions(self) -> tuple[str, ...]:
        return DATA_DIMENSIONS if self._parameter_mesh.dp_replicate > 1 else DATA_DIMENSIONS[1:]

    def model_init(self) -> AbstractContextManager[Any]:
        """Return a context in which models are built on the meta device if ``fsdp.weights`` is set."""
        return nullcontext() if self.options.weights is None else torch.device("meta")

    def refusal(self, bundle: Bundle) -> Refusal | None:
        """Return the reason if a model cannot be sharded, with these options or at all; None if it can."""
        if self.options.float8_gather and self.options.cpu_offload:
            why = "weights in host memory are gathered in the format of the computation, and not in float8"
            return Refusal(why, "leave out one of fsdp.float8_gather and fsdp.cpu_offload")
        if self.options.average_unused and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            why = f"fsdp.average_unused needs a newer PyTorch than {torch.__version__}"
            return Refusal(why, "leave the option out, or install PyTorch 2.13 or newer")
        new = [model for model in bundle.models if id(model) not in self._models]
        refusals = (find_refusal(model, self.options.weights) or _refuse_complex(model) for model in new)
        found = next(filter(None, refusals), None)
        return found or self._dimensions.refusal(new, self._models.values(), self.options, self.precision.policy)

    def wrap(self, bundle: Bundle) -> Bundle:
        """Shard every model that has parameters, and replace the optimizers' parameters by the sharded ones."""
        refused = self.refusal(bundle)
        if refused is not None:
            raise MisuseError(str(refused))
        new = [
            model for model in bundle.models if id(model) not in self._models and any(True for _ in model.parameters())
        ]
        made: list[ShardedModel] = []
        known = {id(optimizer) for optimizer in self._live_optimizers()}
        optimizers = [item for item in bundle.optimizers if id(item) not in known]
        stepped = [(item, groups_and_state(item)) for item in (*self._live_optimizers(), *optimizers)]
        try:
            for model in new:
                made.append(self._shard_model(model))
                self._adapt(made[-1])
            changed = {key: new for wrapped in (*self._models.values(), *made) for key, new in wrapped.changed.items()}
            stale: dict[int, nn.Parameter] = {id(old): value for old, value in self._originals.items()}
            changed |= {key: changed.get(id(value), value) for key, value in stale.items()}
            states = [pair for optimizer, _ in stepped for pair in replace_parameters(optimizer, changed, own_shard_of)]
            self._comm.barrier()  # an error on any rank before this line leaves full models on all ranks
        except BaseException:
            for optimizer, before in stepped:
                restore_groups(optimizer, before)
            for wrapped in reversed(made):
                self._undo_adapt(wrapped)
                wrapped.abandon()
            raise
        finally:
            self._dimensions.clear_plans()
        memory = {sharded.memory_layout(old): (old.untyped_storage(), new) for old, new in states}
        memory.pop(None, None)
        for wrapped in made:
            memory |= wrapped.parameter_memory()
            wrapped.commit()
            self._models[id(wrapped.model)] = wrapped
        self._optimizers += [weakref.ref(item) for item in optimizers]
        if self._dimensions.stages.number > 1:
            self._hooks += [item.register_state_dict_pre_hook(self._share_before_read) for item in optimizers]
        self._report_replaced(changed, states, memory)
        return bundle

    def _share_before_read(self, optimizer: Optimizer) -> None:
        """Complete an optimizer's state before a plain cell reads it, which all ranks do together."""
        if sharded.reads_together():
            self._share_optimizer_states()

    def _shard_model(self, model: nn.Module) -> ShardedModel:
        options = self.options
        units = choose_units(model, options.wrap, options.min_params, options.classes)
        missing = [name for name in options.forward_methods if not callable(getattr(model, name, None))]
        if missing:
            raise ConfigError(f"fsdp.forward_methods names {missing[0]}, which a {type(model).__name__} lacks")
        weights = None
        if options.weights is not None and any(value.is_meta for value in (*model.parameters(), *model.buffers())):
            weights = open_safetensors(options.weights)
        mesh = self.device_mesh if self.groups is None else self.device_mesh[self._data_dimensions]
        policy, parameter_mesh = self.precision.policy, self._parameter_mesh
        settings = unit_settings(model, options, policy, parameter_mesh=parameter_mesh, mesh=mesh, device=self._device)
        expert_mesh = None if self.groups is None else self.groups.expert_mesh
        plan = self._dimensions.plan_of(model)
        try:
            return ShardedModel(
                model,
                units,
                self._comm,
                self._device,
                *settings,
                weights,
                float8=options.float8_gather,
                plan=plan.layers,
                groups=self.groups,
                stages=plan.stages,
                micro_batches=self._dimensions.stages.micro_batches,
                divides_sequences=self._dimensions.cp > 1,
                experts=[submodule_at(model, name) for name in plan.experts],
                expert_settings=expert_settings(settings[0], parameter_mesh, expert_mesh)
                if expert_mesh is not None
                else None,
            )
        except AccelNbError:
            raise
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:  # of the user's own classes
            reason = f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"
            raise MisuseError(
                f"PyTorch's fully_shard cannot shard a {type(model).__name__} ({reason}): train with `--strategy ddp`"
            ) from error

    def _adapt(self, wrapped: ShardedModel) -> None:
        """Register a sharded model's other forward methods, and set its precision, by the options."""
        options, model = self.options, wrapped.model
        root: Any = model
        for name in options.forward_methods:
            register_fsdp_forward_method(model, name)
            if wrapped.float8:
                setattr(model, name, wrapped.float8.with_scales(getattr(model, name)))
        if options.average_unused:
            root.set_reduce_scatter_unused_params(True)
        if options.autocast and self.precision.policy.compute is not None:
            replace_forward(model, forward_in_precision(model, self.precision))

    def _undo_adapt(self, wrapped: ShardedModel) -> None:
        for name in self.options.forward_methods:
            vars(wrapped.model).pop(name, None)
        if self.options.autocast and self.precision.policy.compute is not None:
            restore_forward(wrapped.model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Restore a model's full parameters and its optimizers' full state on every rank; every rank must call."""
        wrapped = self._models.pop(id(model), None)
        if wrapped is None:
            return model
        self._undo_adapt(wrapped)
        wrapped.average_pending()
        self._originals.update(wrapped.parameters())
        if wrapped.pipeline is not None:
            self._share_states(wrapped)
        new = wrapped.gather_new()
        self._originals.update(new)
        restored = wrapped.undo() | {id(old): whole for old, whole in new}
        states = [
            pair
            for optimizer in self._live_optimizers()
            for pair in replace_parameters(optimizer, restored, lambda new, value: self._whole(value))
        ]
        self._report_replaced(restored, states, {})
        return model

    def _report_replaced(
        self, changed: Mapping[int, Tensor], states: Sequence[tuple[Tensor, Tensor]], memory: sharded.ParameterMemory
    ) -> None:
        for old, new in states:
            sharded.record_replaced(old, new)
        self._on_replaced({**changed, **{id(old): new for old, new in states}}, memory)

    def end_interrupted_pass(self) -> None:
        """Free parameters that the pass has left gathered."""
        for wrapped in self._models.values():
            wrapped.free_interrupted()

    def data_coords(self) -> tuple[int, int]:
        """Return the index of this rank's share of the data and their number; ranks of one layer read the same."""
        return self._place.data_index, self._place.num_data

    def grad_sync(self, model: nn.Module, enabled: bool) -> None:
        """Set whether the next backward pass averages the model's gradients."""
        wrapped = self._models.get(id(model))
        if wrapped is not None:
            wrapped.set_gradient_sync(enabled)

    def keep_local(self, model: nn.Module, enabled: bool) -> None:
        """Raise `MisuseError`: gradients are sharded over the ranks in the backward pass."""
        raise MisuseError(
            "gradients cannot stay on each rank under the strategy 'fsdp', whose ranks hold a shard of each: use ddp"
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
        """Compute gradients of the scaled loss; they are averaged and sharded in the backward pass.

        Raises `MisuseError` with ``create_graph`` unless ``inputs`` are given: gradients of weights have no graph.
        """
        if create_graph:
            if inputs is None and self._models:
                raise MisuseError(NO_GRAPH)
            self.check_graph_can_be_kept()
        for wrapped in self._models.values():
            written = wrapped.find_lost_write()
            if written is not None:
                raise MisuseError(LOST_WRITE.format(name=written))
            wrapped.is_pending = wrapped.is_pending or not wrapped.syncs or wrapped.pipeline is not None
            wrapped.register_outside_hooks()
        pipelines = [wrapped.pipeline for wrapped in self._models.values() if wrapped.pipeline is not None]
        if pipelines and (sharded.is_sharded(loss) or create_graph):
            raise MisuseError(
                "the loss uses parameters of a model in stages, of which each worker holds some, or gradients of "
                "gradients: use weight_decay of the optimizer, or train with --pp 1"
            )
        visible = [wrapped.visible for wrapped in self._models.values() if wrapped.visible is not None]
        scalars = [
            (wrapped, LocalGradients(self._comm, wrapped.scalars, have_changed=wrapped.has_local_scalars))
            for wrapped in self._models.values()
            if wrapped.pipeline is None
        ]
        try:
            for item in visible:
                item.show_gathered()
            if inputs is not None:
                gathered = {key: value for item in visible for key, value in item.gathered().items()}
                inputs = [gathered.get(id(value), value) for value in inputs]
            for pipeline in pipelines:
                pipeline.accepts_backward = True
            torch.autograd.backward(self.precision.scale(loss), None, retain_graph, create_graph, inputs=inputs)
        finally:
            for pipeline in pipelines:
                pipeline.accepts_backward = False
            for item in visible:
                item.hide_gathered()
        for wrapped in self._models.values():
            if wrapped.pipeline is not None and wrapped.syncs:
                wrapped.average_pending()
            elif wrapped.syncs:
                wrapped.average_outside_gradients()
        for wrapped, gradients in scalars:
            wrapped.has_local_scalars = not wrapped.syncs
            if wrapped.syncs:
                gradients.average()

    def training_schedule(
        self,
        model: nn.Module,
        name: Literal["gpipe", "1f1b", "zero_bubble"],
        loss_fn: Callable[..., Tensor],
        total_weight: Callable[[Tensor, int], Tensor | None],
    ) -> ScheduledSteps | None:
        """Return an object that trains a wrapped model by a schedule of micro-batches; None if it has no stages."""
        from accel_nb.strategies.pipeline.schedule import TrainingSchedule  # imports torch's tracer

        wrapped = self._models.get(id(model))
        if wrapped is None or wrapped.pipeline is None:
            return None
        output = self.precision.policy.output if self.options.autocast else None

        @contextmanager
        def gathered() -> Iterator[None]:
            wrapped.is_pending = True
            wrapped.keep_gathered()
            yield
            if wrapped.syncs:
                wrapped.average_pending()
                wrapped.free_gathered()

        return TrainingSchedule(
            model,
            wrapped.pipeline,
            name,
            loss_fn,
            total_weight,
            cast=lambda value: value if output is None else cast_half_floats(value, output),
            gathered=gathered,
        )

    def check_graph_can_be_kept(self) -> None:
        """Keep the gathered parameters until the next step, since the graph references them and not the shards."""
        for wrapped in self._models.values():
            wrapped.keep_gathered()

    def is_gathered(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter that is gathered for a pass: only the shards are kept."""
        return any(value is tensor for wrapped in self._models.values() for _, value in wrapped.gathered())

    def finish_gradients(self, bundle: Bundle, factor: float | Tensor) -> None:
        """Average the gradients that no backward pass has averaged, and multiply all gradients by ``factor``."""
        for wrapped in self._models.values():
            wrapped.average_pending()
            wrapped.free_gathered()
            if wrapped.has_local_scalars:
                wrapped.has_local_scalars = False
                LocalGradients(self._comm, wrapped.scalars, have_changed=True).average()
        multiply_gradients(bundle, factor)

    def drop_gradients(self, bundle: Bundle) -> None:
        """Drop gradients, including the unsharded ones that have not been averaged yet."""
        super().drop_gradients(bundle)
        for wrapped in self._models.values():
            wrapped.drop_pending()

    def clip_grad_norm(
        self, bundle: Bundle, max_norm: float, norm_type: float, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Clip gradients to ``max_norm`` and return their total norm before clipping; all-reduces one number."""
        for optimizer in bundle.optimizers:
            self.precision.unscale_(optimizer)
        clipped = list(bundle.parameters()) if parameters is None else list(parameters)
        return clip_total_norm(
            clipped,
            max_norm,
            norm_type,
            self._world,
            self._comm,
            num_stages=self._dimensions.stages.number,
            is_staged=lambda value: any(wrapped.is_staged(value) for wrapped in self._models.values()),
        )

    def run_step(self, optimizer: Optimizer, step: Callable[[], Any], *, has_closure: bool) -> Any:
        """Call ``step``, on this rank's shards as plain tensors where that has the same result."""
        return step() if has_closure else step_on_shards(optimizer, step)

    def complete_state(self) -> None:
        """Add buffers of other stages, and their optimizer states without values; every rank must call."""
        for wrapped in self._models.values():
            if wrapped.pipeline is not None:
                wrapped.pipeline.share_buffers()
        self._share_optimizer_states()

    def _share_optimizer_states(self) -> None:
        for wrapped in self._models.values():
            if wrapped.pipeline is not None:
                self._share_states(wrapped)

    def _share_states(self, wrapped: ShardedModel) -> None:
        """Add the optimizer states of parameters of other stages, without values; every rank must call."""
        assert self.groups is not None, "several stages have a mesh"
        staged = [now for now, _ in wrapped.parameters() if wrapped.is_staged(now)]
        share_states(self._live_optimizers(), staged, self.groups.pp)

    def read_state(self, bundle: Bundle, *, copied: bool = True) -> dict[str, Any]:
        """Return all training state, a `Slice` for each tensor of which this rank holds a shard."""
        for model in bundle.models:
            wrapped = self._models.get(id(model))
            if wrapped is not None:
                wrapped.average_pending()
                if wrapped.pipeline is not None:
                    wrapped.pipeline.share_buffers()
                    self._share_states(wrapped)
        with sharded.no_collective_reads():
            weights = [model.state_dict() for model in bundle.models]
        is_staged = self._dimensions.stages.number > 1
        states = [ordered_state(item) if is_staged else item.state_dict() for item in bundle.optimizers]
        return {
            "models": [sliced(values, copied) for values in weights],
            "optimizers": [sliced(values, copied) for values in states],
            "schedulers": [sliced(scheduler.state_dict(), copied) for scheduler in bundle.schedulers],
            "precision": self.precision.state_dict(),
        }

    def write_state(self, bundle: Bundle, state: Mapping[str, Any]) -> None:
        """Load state; this rank uses only its shard of tensors that are full, or still in a file."""
        for model, values in zip(bundle.models, state["models"], strict=True):
            model.load_state_dict(shard_values(values, dict(model.named_parameters(remove_duplicate=False))))
        for optimizer, values in zip(bundle.optimizers, state["optimizers"], strict=True):
            parameters = stepped_parameters(optimizer)
            own = {
                key: shard_values(kept, dict.fromkeys(kept, parameters[key]))
                for key, kept in values["state"].items()
                if not sharded.is_absent(parameters[key])
            }
            rest = materialize({key: value for key, value in values.items() if key != "state"})
            optimizer.load_state_dict(copy_state({**rest, "state": own}))
        for scheduler, values in zip(bundle.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copy_state(materialize(values)))
        self.precision.load_state_dict(state["precision"])

    def statistics(self) -> dict[str, float]:
        """Return the load of the busiest expert as a multiple of the mean, if experts are divided."""
        loads = [wrapped.experts.peak_load() for wrapped in self._models.values() if wrapped.experts is not None]
        return {"busiest expert": max(loads)} if loads else {}

    def describe(self) -> dict[str, Any]:
        """Return the number of units, the dtypes of trained weights, and the options that are not at their default."""
        wrapped_models = list(self._models.values())
        description: dict[str, Any] = (
            {"units": sum(wrapped.num_units for wrapped in wrapped_models)} if wrapped_models else {}
        )
        if self.precision.policy.compute is not None and wrapped_models:
            kept = {
                value.dtype for wrapped in wrapped_models for value in wrapped.model.parameters() if value.requires_grad
            }
            description["weights"] = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in kept))
        description |= self.options.model_dump(mode="json", exclude_defaults=True)
        if self._dimensions.are_divided:
            description |= describe_divided(wrapped_models, self._place)
        if self.options.float8_gather and wrapped_models:
            description["float8_gather"] = f"of {sum(len(wrapped.float8 or ()) for wrapped in wrapped_models)} weights"
        return description

    def close(self) -> None:
        """Restore the full parameters of every model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for wrapped in list(self._models.values()):
            self.unwrap(wrapped.model)

    def _live_optimizers(self) -> list[Optimizer]:
        self._optimizers = [held for held in self._optimizers if held() is not None]
        return [optimizer for held in self._optimizers if (optimizer := held()) is not None]

    def _whole(self, value: Tensor) -> Tensor:
        return sharded.gather_full(value, self._comm) if sharded.is_sharded(value) else value


def _refuse_complex(model: nn.Module) -> Refusal | None:
    """Return the reason if a model has complex and real parameters, which FSDP2 cannot shard in one unit."""
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    complex_names = [name for name, value in trained if value.is_complex()]
    if not complex_names or len(complex_names) == len(trained):
        return None
    return Refusal(
        f"{complex_names[0]} of the {type(model).__name__} is complex and others are not, which FSDP2 cannot shard "
        "together",
        "hold it as a real parameter and use torch.view_as_complex in forward, or train with --strategy ddp",
    )
