"""PyTorch's `fully_shard`: each rank holds a part of every parameter, its gradient and its optimizer state.

Parameters are gathered one unit at a time, before the unit computes, and freed after it; gradients are averaged and
divided in the backward pass. Optimizers stay the same objects: their groups get the sharded parameters.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_nb.bigmodel.safetensors_reader import open_safetensors
from accel_nb.checkpoint.load import materialize
from accel_nb.config.sections import FsdpOptions
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.precision.forward import cast_half_floats, forward_in_precision
from accel_nb.precision.policy import Precision
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.mesh_groups import MeshGroups
from accel_nb.runtime.mesh import DATA_DIMENSIONS, arrange
from accel_nb.runtime.tensors.instance_patching import replace_forward, restore_forward
from accel_nb.runtime.tensors.module_paths import submodule_at
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.runtime.world import World
from accel_nb.strategies.base import (
    LOST_WRITE,
    Bundle,
    Capabilities,
    OnReplaced,
    Refusal,
    ScheduledSteps,
    Stages,
    Stepping,
    copy_state,
    multiply_gradients,
    multiply_tensors,
)
from accel_nb.strategies.context_parallel.divided_sequences import refuse_blocks
from accel_nb.strategies.expert_parallel.expert_plan import plan_experts
from accel_nb.strategies.fsdp.local_step import step_on_parts
from accel_nb.strategies.fsdp.optimizer_parameters import replace_parameters
from accel_nb.strategies.fsdp.sharded_model import ShardedModel, find_refusal
from accel_nb.strategies.fsdp.sharded_state import (
    absent_state,
    describe_state,
    groups_and_state,
    own_part_of,
    restore_groups,
    shard_values,
    sliced,
)
from accel_nb.strategies.fsdp.wrap_policy import choose_units
from accel_nb.strategies.pipeline.stage_plan import StagePlan, plan_stages
from accel_nb.strategies.tensor_parallel.plan import DivisionPlan, plan_division


class Fsdp(Stepping):
    """Trains models whose parameters are divided among the ranks."""

    options: FsdpOptions
    name: ClassVar[str] = "fsdp"
    capabilities: ClassVar[Capabilities] = Capabilities(
        min_world=2, priority=40, shards_params=True, keeps_local=False, divides_layers=True
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
        # How many ranks compute each layer together, and whether the others hold copies in place of parts of the model.
        self._tp = 1
        self._cp = 1
        self._ep = 1
        self._replicates = False
        self._stages = Stages()
        self._hooks: list[Any] = []
        self.groups: MeshGroups | None = None
        # By model: its layers to divide, or why it cannot be divided.
        self._plans: weakref.WeakKeyDictionary[nn.Module, DivisionPlan | Refusal] = weakref.WeakKeyDictionary()
        # By model: the names of its modules of experts, or why they cannot be divided.
        self._expert_plans: weakref.WeakKeyDictionary[nn.Module, list[str] | Refusal] = weakref.WeakKeyDictionary()

    def divide_layers(self, size: int, *, replicates: bool) -> None:
        """Divide layers among ``size`` ranks; with ``replicates`` the others hold copies, else parts of the rest."""
        self._tp, self._replicates = size, replicates

    def divide_stages(self, stages: Stages, *, replicates: bool) -> None:
        """Divide the blocks of models among ranks; with ``replicates`` the others hold copies, else parts."""
        self._stages, self._replicates = stages, replicates

    def divide_sequences(self, size: int, *, replicates: bool) -> None:
        """Divide sequences among ``size`` ranks; with ``replicates`` all ranks hold copies, else parts."""
        self._cp, self._replicates = size, replicates

    def divide_experts(self, size: int, *, replicates: bool) -> None:
        """Divide experts among ``size`` ranks; with ``replicates`` ranks hold copies of all else, else parts."""
        self._ep, self._replicates = size, replicates

    def report_replaced(self, call: OnReplaced) -> None:
        """Call a function with the sharded parameters by id of whole ones, and with these when they are restored."""
        self._on_replaced = call

    def open(self, world: World, comm: Communicator) -> None:
        """Set the world and its communicator; the default process group must be open."""
        self._world = world
        self._comm = comm
        self._device = torch.device(world.device)
        shard = 1 if self._replicates else self.options.hybrid_shard_size
        degrees = {"pp": self._stages.number, "cp": self._cp, "tp": self._tp, "ep": self._ep}
        self._place = arrange(world.rank, world.size, **degrees, shard=shard)
        self._holding = self._place.holding(copies=self._replicates)
        if self._divides:
            self.groups = MeshGroups.open(self._place, world, copies=self._replicates)

    @property
    def device_mesh(self) -> Any:
        """The mesh of all ranks that hold one model; the first read opens its groups, so every rank must read it."""
        if self.groups is not None:
            return self.groups.device_mesh
        if self._mesh is None:
            shape = tuple(getattr(self._holding, name) for name in self._data_dimensions)
            self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=self._data_dimensions)
        return self._mesh

    @property
    def _data_dimensions(self) -> tuple[str, ...]:
        return DATA_DIMENSIONS if self._holding.dp_replicate > 1 else DATA_DIMENSIONS[1:]

    def model_init(self) -> AbstractContextManager[Any]:
        """Return a context in which models are built on the meta device if ``fsdp.weights`` is set."""
        return nullcontext() if self.options.weights is None else torch.device("meta")

    def refusal(self, bundle: Bundle) -> Refusal | None:
        """Return why a model cannot be sharded, with these options or at all; None if it can."""
        if self.options.float8_gather and self.options.cpu_offload:
            why = "weights in host memory are gathered in the format of the computation, and not in float8"
            return Refusal(why, "leave out one of fsdp.float8_gather and fsdp.cpu_offload")
        if self.options.average_unused and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            why = f"fsdp.average_unused needs a newer PyTorch than {torch.__version__}"
            return Refusal(why, "leave the option out, or install PyTorch 2.13 or newer")
        new = [model for model in bundle.models if id(model) not in self._models]
        refusals = (find_refusal(model, self.options.weights) or _refuse_complex(model) for model in new)
        found = next(filter(None, refusals), None)
        if found is not None or not self._divides:
            return found
        found = self._refuse_options(new)
        dimensions: tuple[tuple[int, Callable[[nn.Module], Any], str], ...] = (
            (self._stages.number, self._stages_of, "pipeline"),
            (self._cp, lambda model: refuse_blocks(model, self._cp), "sequences"),
            (self._ep, self._experts_of, "experts"),
        )
        for degree, plan_of, division in dimensions:
            if found is None and degree > 1:
                found = self._refuse_division(new, plan_of, division)
        return self._refuse_layers(new) if found is None and self._tp > 1 else found

    @property
    def _divides(self) -> bool:
        """Whether ranks compute layers, sequences, blocks or experts together."""
        return max(self._tp, self._cp, self._stages.number, self._ep) > 1

    def _refuse_options(self, models: Sequence[nn.Module]) -> Refusal | None:
        """Return which option cannot be combined with layers or blocks that are divided; None if all can."""
        options = self.options
        precision = self.precision.policy
        unsupported = {
            f"precision {precision.name}": precision.loss_scaling or precision.name == "fp8",
            "fsdp.weights": options.weights is not None,
            "fsdp.cpu_offload": options.cpu_offload,
            "fsdp.float8_gather": options.float8_gather,
        }
        degrees = {"tp": self._tp, "cp": self._cp, "pp": self._stages.number, "ep": self._ep}
        dimension = next(f"mesh.{name} {degree}" for name, degree in degrees.items() if degree > 1)
        for name, is_set in unsupported.items():
            if is_set:
                return Refusal(f"{dimension} cannot be combined with {name}", "leave out one of the two")
        compiled = next((model for model in models if isinstance(model, OptimizedModule)), None)
        if compiled is not None:
            return Refusal(
                f"{dimension} cannot be combined with torch.compile of a {type(compiled._orig_mod).__name__}",
                "leave out one of the two",
            )
        return None

    def _refuse_division(
        self, models: Sequence[nn.Module], plan_of: Callable[[nn.Module], Any], division: str
    ) -> Refusal | None:
        """Return why no model can be divided in one way; None if one can, or a prepared model is."""
        plans = [plan_of(model) for model in models if any(True for _ in model.parameters())]
        refused = [plan for plan in plans if isinstance(plan, Refusal)]
        is_divided = any(getattr(part, division) is not None for part in self._models.values())
        return None if is_divided or len(refused) < len(plans) else next(iter(refused), None)

    def _experts_of(self, model: nn.Module) -> list[str] | Refusal:
        found = self._expert_plans.get(model)
        if found is None:
            found = self._expert_plans[model] = plan_experts(model, self._ep)
        return found

    def _stages_of(self, model: nn.Module) -> StagePlan | Refusal:
        stages = self._stages
        return plan_stages(
            model,
            stages.number,
            stages.split_points,
            stages_per_rank=stages.per_rank,
            is_in_parts=stages.micro_batches > 1,
        )

    def _refuse_layers(self, models: Sequence[nn.Module]) -> Refusal | None:
        """Return why layers of these models cannot be divided; None if those of any prepared model are."""
        with_parameters = [model for model in models if any(True for _ in model.parameters())]
        plans = [self._plan_of(model) for model in with_parameters]
        refused = next((plan for plan in plans if isinstance(plan, Refusal)), None)
        if refused is not None or not plans or any(isinstance(plan, DivisionPlan) and plan.groups for plan in plans):
            return refused
        if any(part.plan is not None and part.plan.groups for part in self._models.values()):
            return None
        named = ", ".join(type(model).__name__ for model in with_parameters)
        reasons = {
            f"{kind}: {why}"
            for plan in plans
            if isinstance(plan, DivisionPlan)
            for kind, why in plan.left_whole.items()
        }
        return Refusal(
            f"mesh.tp {self._tp} finds no layers to divide in {named}"
            + (f" ({'; '.join(sorted(reasons))})" if reasons else ""),
            "train with --tp 1; --strategy fsdp divides any model",
        )

    def _plan_of(self, model: nn.Module) -> DivisionPlan | Refusal:
        plan = self._plans.get(model)
        if plan is None:
            plan = self._plans[model] = plan_division(model, self._tp)
        return plan

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
                made.append(self._divide(model))
                self._adapt(made[-1])
            changed = {key: new for part in (*self._models.values(), *made) for key, new in part.changed.items()}
            stale: dict[int, nn.Parameter] = {id(old): value for old, value in self._originals.items()}
            changed |= {key: changed.get(id(value), value) for key, value in stale.items()}
            for optimizer, _ in stepped:
                replace_parameters(optimizer, changed, own_part_of)
            self._comm.barrier()  # an error on any rank before this line leaves full models on all ranks
        except BaseException:
            for optimizer, before in stepped:
                restore_groups(optimizer, before)
            for part in reversed(made):
                self._undo_adapt(part)
                part.abandon()
            raise
        memory: dict[Any, tuple[Any, nn.Parameter]] = {}
        for part in made:
            memory |= part.parameter_memory()
            part.commit()
            self._models[id(part.model)] = part
        self._optimizers += [weakref.ref(item) for item in optimizers]
        if self._stages.number > 1:
            self._hooks += [item.register_state_dict_pre_hook(self._share_before_read) for item in optimizers]
        self._on_replaced(changed, memory)
        return bundle

    def _share_before_read(self, optimizer: Optimizer) -> None:
        """Complete the state before a plain cell reads it, which all ranks do together."""
        if sharded.reads_together():
            self.share_state()

    def _divide(self, model: nn.Module) -> ShardedModel:
        options = self.options
        units = choose_units(model, options.wrap, options.min_params, options.classes)
        missing = [name for name in options.forward_methods if not callable(getattr(model, name, None))]
        if missing:
            raise ConfigError(f"fsdp.forward_methods names {missing[0]}, which a {type(model).__name__} lacks")
        weights = None
        if options.weights is not None and any(value.is_meta for value in (*model.parameters(), *model.buffers())):
            weights = open_safetensors(options.weights)
        settings = self._settings_for(model)
        plan = self._plan_of(model) if self._tp > 1 else None
        assert not isinstance(plan, Refusal), "refused before"
        stages = self._stages_of(model) if self._stages.number > 1 else None
        experts = self._experts_of(model) if self._ep > 1 else []
        return ShardedModel(
            model,
            units,
            self._comm,
            self._device,
            *settings,
            weights,
            float8=options.float8_gather,
            plan=plan,
            groups=self.groups,
            stages=None if isinstance(stages, Refusal) else stages,
            micro_batches=self._stages.micro_batches,
            divides_sequences=self._cp > 1,
            experts=[] if isinstance(experts, Refusal) else [submodule_at(model, name) for name in experts],
            expert_settings=self._expert_settings(settings[0]),
        )

    def _adapt(self, part: ShardedModel) -> None:
        """Register a divided model's other forward methods, and set its precision, by the options."""
        options, model = self.options, part.model
        root: Any = model
        for name in options.forward_methods:
            register_fsdp_forward_method(model, name)
            if part.float8:
                setattr(model, name, part.float8.with_scales(getattr(model, name)))
        if options.average_unused:
            root.set_reduce_scatter_unused_params(True)
        if options.autocast and self.precision.policy.compute is not None:
            replace_forward(model, forward_in_precision(model, self.precision))

    def _undo_adapt(self, part: ShardedModel) -> None:
        for name in self.options.forward_methods:
            vars(part.model).pop(name, None)
        if self.options.autocast and self.precision.policy.compute is not None:
            restore_forward(part.model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Restore a model's full parameters and its optimizers' full state on every rank; every rank must call."""
        part = self._models.pop(id(model), None)
        if part is None:
            return model
        self._undo_adapt(part)
        part.average_pending()
        self._originals.update(part.parameters())
        if part.pipeline is not None:
            self._share_states(part)
        new = part.gather_new()
        self._originals.update(new)
        restored = part.undo() | {id(old): whole for old, whole in new}
        for optimizer in self._live_optimizers():
            replace_parameters(optimizer, restored, lambda new, value: self._whole(value))
        self._on_replaced(restored, {})
        return model

    def data_coords(self) -> tuple[int, int]:
        """Return the index of this rank's share of the data, and their number: ranks of one layer read the same."""
        return self._place.data_index, self._place.num_data

    def grad_sync(self, model: nn.Module, enabled: bool) -> None:
        """Set whether the next backward pass averages the model's gradients."""
        part = self._models.get(id(model))
        if part is not None:
            part.set_gradient_sync(enabled)

    def keep_local(self, model: nn.Module, enabled: bool) -> None:
        """Raise MisuseError: gradients are divided among the ranks in the backward pass."""
        raise MisuseError(
            "gradients cannot stay on each rank under the strategy 'fsdp', whose ranks hold a part of each: use ddp"
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
        """Compute gradients of the scaled loss; they are averaged and divided in the backward pass."""
        if create_graph:
            self.keep_graph()
        for part in self._models.values():
            written = part.find_lost_write()
            if written is not None:
                raise MisuseError(LOST_WRITE.format(name=written))
            part.is_pending = part.is_pending or not part.syncs or part.pipeline is not None
            part.weigh_outside()
        pipelines = [part.pipeline for part in self._models.values() if part.pipeline is not None]
        if pipelines and (sharded.is_sharded(loss) or create_graph):
            raise MisuseError(
                "the loss uses parameters of a model in stages, of which each worker holds some, or gradients of "
                "gradients: use weight_decay of the optimizer, or train with --pp 1"
            )
        for pipeline in pipelines:
            pipeline.accepts_backward = True
        try:
            torch.autograd.backward(self.precision.scale(loss), None, retain_graph, create_graph, inputs=inputs)
        finally:
            for pipeline in pipelines:
                pipeline.accepts_backward = False
        for part in self._models.values():
            if part.pipeline is not None and part.syncs:
                part.average_pending()
            elif part.syncs:
                part.average_outside()

    def training_schedule(
        self,
        model: nn.Module,
        name: Literal["gpipe", "1f1b", "zero_bubble"],
        loss_fn: Callable[..., Tensor],
        weigh: Callable[[Tensor, int], Tensor | None],
    ) -> ScheduledSteps | None:
        """Return an object that trains a wrapped model by a schedule of micro-batches; None if it has no stages."""
        from accel_nb.strategies.pipeline.schedule import TrainingSchedule  # imports torch's tracer

        part = self._models.get(id(model))
        if part is None or part.pipeline is None:
            return None
        output = self.precision.policy.output if self.options.autocast else None

        @contextmanager
        def gathered() -> Iterator[None]:
            part.is_pending = True
            part.keep_gathered()
            yield
            if part.syncs:
                part.average_pending()
                part.free_gathered()

        return TrainingSchedule(
            model,
            part.pipeline,
            name,
            loss_fn,
            weigh,
            cast=lambda value: value if output is None else cast_half_floats(value, output),
            gathered=gathered,
        )

    def keep_graph(self) -> None:
        """Keep the gathered parameters until the next step: the graph references them, and not the parts."""
        for part in self._models.values():
            part.keep_gathered()

    def is_gathered(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter that is gathered for a pass: only the parts are kept."""
        return any(value is tensor for part in self._models.values() for _, value in part.gathered())

    def finish_gradients(self, bundle: Bundle, factor: float | Tensor) -> None:
        """Average the gradients that no backward pass has averaged, and multiply all gradients by ``factor``."""
        owned = set(map(id, stepped_parameters(*bundle.optimizers)))
        for part in self._models.values():
            part.average_pending()
            part.free_gathered()
            for value in part.replicated:
                if id(value) in owned and value.requires_grad:
                    value.grad = torch.zeros_like(value) if value.grad is None else value.grad
                    self._comm.all_reduce(value.grad, "mean")
        multiply_gradients(bundle, factor)

    def drop_gradients(self, bundle: Bundle) -> None:
        """Drop gradients, including the unsharded ones that have not been averaged yet."""
        super().drop_gradients(bundle)
        for part in self._models.values():
            part.drop_pending()

    @torch.no_grad()
    def clip_grad_norm(
        self, bundle: Bundle, max_norm: float, norm_type: float, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Clip gradients to ``max_norm`` and return their total norm before clipping; all-reduces one number."""
        for optimizer in bundle.optimizers:
            self.precision.unscale_(optimizer)
        clipped = list(bundle.parameters()) if parameters is None else list(parameters)
        gradients = [value.grad for value in clipped if value.grad is not None]
        held_by = {id(value.grad): self._num_holders(value) for value in clipped if value.grad is not None}
        whole = [gradient for gradient in gradients if not sharded.is_sharded(gradient)]
        # By the number of ranks that hold the same part: whatever the mesh is, one message carries the whole norm.
        parts: dict[int, list[Tensor]] = {}
        for gradient in gradients:
            if sharded.is_sharded(gradient):
                copies = sharded.num_copies(gradient, held_by[id(gradient)])
                parts.setdefault(copies, []).append(sharded.local_part(gradient))
        norms = {
            copies: self._norm([part for part in own if part.numel()], norm_type) for copies, own in parts.items()
        } or {1: self._norm([], norm_type)}
        replicated_norm = self._norm(whole, norm_type)
        if math.isinf(norm_type):
            sharded_norm = functools.reduce(torch.maximum, norms.values())
            total = torch.maximum(self._comm.all_reduce(sharded_norm, "max"), replicated_norm)
        else:
            most = self._world.size if self._stages.number > 1 else max(norms)
            powers = [norm**norm_type * (most / copies) for copies, norm in norms.items()]
            sharded_sum = self._comm.all_reduce(functools.reduce(torch.add, powers)) / most
            total = (sharded_sum + replicated_norm**norm_type) ** (1.0 / norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        multiply_tensors((*itertools.chain(*parts.values()), *whole), scale)
        return total

    def run_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Call ``step``, on this rank's parts as plain tensors where that has the same result."""
        return step_on_parts(optimizer, step)

    def _num_holders(self, parameter: Tensor) -> int:
        """Return how many ranks hold a parameter, or a part of it."""
        is_staged = any(part.is_staged(parameter) for part in self._models.values())
        return self._world.size // self._stages.number if is_staged else self._world.size

    def share_state(self) -> None:
        """Add optimizer states that only ranks of other stages have, without their values; every rank must call."""
        for part in self._models.values():
            if part.pipeline is not None:
                self._share_states(part)

    def _share_states(self, part: ShardedModel) -> None:
        """Add the optimizer states of parameters of other stages, without values; every rank must call."""
        assert self.groups is not None, "several stages have a mesh"
        staged = [now for now, _ in part.parameters() if part.is_staged(now)]
        for optimizer in self._live_optimizers():
            own = {
                str(number): {name: describe_state(item) for name, item in optimizer.state[value].items()}
                for number, value in enumerate(staged)
                if value in optimizer.state and not sharded.is_absent(value)
            }
            found = {key: state for own in self.groups.pp.all_gather_json(own) for key, state in own.items()}
            for number, value in enumerate(staged):
                if sharded.is_absent(value):
                    optimizer.state.pop(value, None)
                    state = found.get(str(number))
                    if state is not None:
                        optimizer.state[value] = {name: absent_state(item, value) for name, item in state.items()}

    def read_state(self, bundle: Bundle, *, copied: bool = True) -> dict[str, Any]:
        """Return all training state, a `Slice` for each tensor of which this rank holds a part."""
        for model in bundle.models:
            part = self._models.get(id(model))
            if part is not None:
                part.average_pending()
                if part.pipeline is not None:
                    part.pipeline.share_buffers()
                    self._share_states(part)
        with sharded.no_collective_reads():
            weights = [model.state_dict() for model in bundle.models]
        return {
            "models": [sliced(values, copied) for values in weights],
            "optimizers": [sliced(self._state_of(optimizer), copied) for optimizer in bundle.optimizers],
            "schedulers": [sliced(scheduler.state_dict(), copied) for scheduler in bundle.schedulers],
            "precision": self.precision.state_dict(),
        }

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, in the same order on all ranks."""
        state = optimizer.state_dict()
        return state if self._stages.number == 1 else {**state, "state": dict(sorted(state["state"].items()))}

    def write_state(self, bundle: Bundle, state: Mapping[str, Any]) -> None:
        """Load state; of tensors that are full, or still in a file, this rank uses its shard only."""
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
        loads = [part.experts.peak_load() for part in self._models.values() if part.experts is not None]
        return {"busiest expert": max(loads)} if loads else {}

    def describe(self) -> dict[str, Any]:
        """Return the number of units, the dtypes of trained weights, and the options that are not at their default."""
        parts = list(self._models.values())
        facts: dict[str, Any] = {"units": sum(part.num_units for part in parts)} if parts else {}
        if self.precision.policy.compute is not None and parts:
            kept = {value.dtype for part in parts for value in part.model.parameters() if value.requires_grad}
            facts["weights"] = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in kept))
        facts |= self.options.model_dump(mode="json", exclude_defaults=True)
        plans = [part.plan for part in parts if part.plan is not None]
        if self._divides:
            last = replace(self._place, rank=self._world.size - 1)
            divided = [part.pipeline.plan.describe() for part in parts if part.pipeline is not None]
            if plans:
                num_divided, num_layers = (
                    sum(counts) for counts in zip(*((p.num_divided, p.num_layers) for p in plans), strict=True)
                )
                divided.append(f"{num_divided} of {num_layers} linear layers divided")
            arranged = f"{self._place.describe()} (rank {last.rank} is {last.describe_rank()})"
            facts["mesh"] = ", ".join([arranged, *divided])
            for part in parts:
                facts |= {} if part.sequences is None else part.sequences.describe()
                if part.experts is not None:
                    facts["experts"] = part.experts.describe()
        if plans:
            if any(group.draws for plan in plans for group in plan.groups):
                facts["dropout"] = "in divided layers differs from that of one device"
            for plan in plans:
                facts |= {f"{kind} not divided:": why for kind, why in plan.left_whole.items()}
        if self.options.float8_gather and parts:
            facts["float8_gather"] = f"of {sum(len(part.float8 or ()) for part in parts)} weights"
        return facts

    def close(self) -> None:
        """Restore the full parameters of every model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for part in list(self._models.values()):
            self.unwrap(part.model)

    def _live_optimizers(self) -> list[Optimizer]:
        self._optimizers = [held for held in self._optimizers if held() is not None]
        return [optimizer for held in self._optimizers if (optimizer := held()) is not None]

    def _whole(self, value: Tensor) -> Tensor:
        return sharded.gather_full(value, self._comm) if sharded.is_sharded(value) else value

    def _norm(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        if not gradients:
            return torch.zeros((), dtype=torch.float32, device=self._device)
        return torch.nn.utils.get_total_norm(gradients, norm_type).to(self._device)

    def _settings_for(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of `fully_shard` for a model's units, and those for the model itself."""
        place = self._holding
        mesh = self.device_mesh if self.groups is None else self.groups.device_mesh[self._data_dimensions]
        policy, options = self.precision.policy, self.options
        compute = None if options.autocast else policy.compute
        is_half = compute is not None or any(value.dtype in _HALF for value in model.parameters())
        reduce = torch.float32 if is_half and options.reduce_dtype == "fp32" else None
        gathers_again = options.reshard_after_forward and place.dp_shard > 1 and place.pp == 1
        settings: dict[str, Any] = {
            "mesh": mesh,
            # With a single part there is nothing to gather again; a stage gathers once for all micro-batches.
            "reshard_after_forward": None if gathers_again else False,
            "mp_policy": MixedPrecisionPolicy(compute, reduce),
        }
        if options.cpu_offload:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type(self._device).pins_memory)
        output = policy.output if compute is not None else None
        return settings, {**settings, "mp_policy": MixedPrecisionPolicy(compute, reduce, output)}

    def _expert_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `fully_shard` for experts: their ranks are other ones, and inputs are not cast."""
        if self.groups is None or self.groups.expert_mesh is None:
            return settings
        copies, shard, _ = self._holding.expert_shape
        policy = replace(settings["mp_policy"], cast_forward_inputs=False)
        kept = settings["reshard_after_forward"] if shard > 1 else False
        mesh = self.groups.expert_mesh[DATA_DIMENSIONS if copies > 1 else DATA_DIMENSIONS[1:]]
        return {**settings, "mesh": mesh, "reshard_after_forward": kept, "mp_policy": policy}


_HALF = (torch.bfloat16, torch.float16)


def _refuse_complex(model: nn.Module) -> Refusal | None:
    """Return why a model with complex and real parameters cannot be divided: FSDP2 joins those of a unit."""
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    complex_names = [name for name, value in trained if value.is_complex()]
    if not complex_names or len(complex_names) == len(trained):
        return None
    return Refusal(
        f"{complex_names[0]} of the {type(model).__name__} is complex and others are not, which FSDP2 cannot divide "
        "together",
        "hold it as a real parameter and use torch.view_as_complex in forward, or train with --strategy ddp",
    )
