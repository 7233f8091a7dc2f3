"""Sharding of one model by PyTorch's `fully_shard`, and its restoration.

`fully_shard` replaces parameters by distributed tensors, and cannot undo it. Here the model's original parameters are
kept, without their memory, and restored in the end, so that references to them refer to the trained parameters. All
uses of undocumented attributes of `fully_shard` are in this file.
"""

from __future__ import annotations

import copy
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state, distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import fully_shard

from accel_nb.bigmodel.safetensors_reader import SafetensorsCheckpoint
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.gradients import any_rank_has_gradient, fill_missing_gradients
from accel_nb.runtime.distributed.layer_exchange import LayerExchange
from accel_nb.runtime.distributed.mesh_groups import MeshGroups
from accel_nb.runtime.distributed.sequence_exchange import SequenceExchange
from accel_nb.runtime.distributed.token_exchange import TokenExchange
from accel_nb.runtime.process.user_code import is_user_module
from accel_nb.runtime.tensors.instance_patching import (
    PLAIN_CLASS,
    patch_instance,
    reduce_as_innermost,
    unpatch_instance,
    without_class_check,
)
from accel_nb.runtime.tensors.module_paths import submodule_at
from accel_nb.strategies.context_parallel.divided_sequences import BlockCopies, SequenceDivision
from accel_nb.strategies.expert_parallel.divided_experts import ExpertDivision
from accel_nb.strategies.fsdp.float8_gather import Float8Gather
from accel_nb.strategies.fsdp.meta_weights import WeightFilling, fill_parameter
from accel_nb.strategies.fsdp.new_parts import gather_new_parts, put_back_renamed
from accel_nb.strategies.fsdp.parameter_groups import adapt_group, groups_of
from accel_nb.strategies.fsdp.sharded_state import gather_state, shard_state_dict
from accel_nb.strategies.fsdp.visible_shards import VisibleShards
from accel_nb.strategies.pipeline.pipeline import Pipeline
from accel_nb.strategies.pipeline.stage_plan import StagePlan, staged_parameters
from accel_nb.strategies.tensor_parallel.divided_layers import LayerDivision, divided_parameters, shard_of
from accel_nb.strategies.tensor_parallel.plan import DivisionPlan

_SOURCE = "torch.distributed.fsdp._fully_shard"
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", STATE_KEY, REGISTRY_KEY)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A name of a parameter in a module, and the parameter that it had before sharding."""

    module: nn.Module
    name: str
    original: nn.Parameter


class ShardedModel:
    """A sharded model: the constructor shards the model, `undo` restores it. Every rank must call both.

    Until `commit` the whole values are kept, and `abandon` restores them without other ranks; so does an error.

    ``settings`` are arguments of `fully_shard` for the units, ``root_settings`` for the rest of the model. All ranks
    get the values of rank 0; each rank reads its shard of a model on the meta device from ``weights``. ``float8``
    gathers the weights of float8 layers in float8. Layers of ``plan`` are divided by ``groups`` before. With ``stages``
    a rank holds the blocks of one stage only, and the parts outside of blocks; ``micro_batches`` is their number in a
    batch. With ``divides_sequences`` ranks of ``groups`` compute shards of sequences. The modules ``experts`` are
    divided among ranks of ``groups``, and sharded with ``expert_settings``.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        comm: Communicator,
        device: torch.device,
        settings: dict[str, Any],
        root_settings: dict[str, Any],
        weights: SafetensorsCheckpoint | None = None,
        *,
        float8: bool = False,
        plan: DivisionPlan | None = None,
        groups: MeshGroups | None = None,
        stages: StagePlan | None = None,
        micro_batches: int = 1,
        divides_sequences: bool = False,
        experts: Sequence[nn.Module] = (),
        expert_settings: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.syncs = True
        # This rank holds gradients of backward passes that were not averaged; of scalars without stages.
        self.is_pending = False
        self.has_local_scalars = False
        self._keeps_gathered = False
        # By name of a gathered parameter: how often code has written to it, if it has.
        self._versions: dict[str, int] = {}
        self._comm = comm
        self._slots = [
            _Slot(module, name, value)
            for module in model.modules()
            for name, value in module._parameters.items()
            if value is not None
        ]
        # A scalar cannot be sharded: each rank has it, and its gradient is averaged after backward passes.
        self.replicated = list({id(p.original): p.original for p in self._slots if p.original.dim() == 0}.values())
        # The device that stores the shards: with offloading the CPU.
        self._home = torch.device("cpu") if "offload_policy" in settings else device
        filling = None if weights is None else WeightFilling(model, weights)
        if filling is not None:
            filling.fill_whole(device)
        self._share_values(device)
        ignored = {"ignored_params": set(self.replicated)} if self.replicated else {}
        self._groups_of_ranks = groups
        # By id of an original, the stage that has it; those that several stages or the rest of the model use have none.
        self._stages = {} if stages is None else staged_parameters(model, stages)
        own_stage = 0 if groups is None else groups.mesh.index("pp")
        absent = {key for key, stage in self._stages.items() if stage != own_stage}
        if absent:
            left = [place.original for place in self._slots if id(place.original) in absent]
            ignored = {"ignored_params": {*self.replicated, *left}}
        self._absent = absent
        self._staged: set[int] = set()
        self.pipeline: Pipeline | None = None
        # By id, tensors with hooks on their gradients, and the hooks' handles.
        self._hooked_tensors: dict[int, tuple[Tensor, Any]] = {}
        # A rank calls only the blocks of its own stage.
        units = [unit for unit in units if not self._is_absent(unit) and unit not in experts]
        self._units = [*experts, *units, model]
        self._classes = [type(unit) for unit in self._units]
        self.float8: Float8Gather | None = None
        self.changed: dict[int, nn.Parameter] = {}
        self.plan = plan
        self._layers: LayerDivision | None = None
        self.sequences: SequenceDivision | None = None
        self.experts: ExpertDivision | None = None
        self.visible: VisibleShards | None = None
        try:
            blocks = BlockCopies.of(model) if divides_sequences else None
            if plan is not None and groups is not None:
                self._divide_layers(plan, groups, device)
            if blocks is not None and groups is not None:
                cp = groups.cp.world
                exchange = SequenceExchange(groups.cp, cp.rank, cp.size)  # pyright: ignore[reportArgumentType]
                self.sequences = SequenceDivision(model, exchange, blocks, is_main=groups.mesh.rank == 0)
                self._classes = [type(unit) for unit in self._units]
            if experts and groups is not None:
                self._divide_experts(experts, groups, device)
            if stages is not None and groups is not None:
                self._divide_stages(stages, groups, device, micro_batches)
            for unit in self._units:
                own = root_settings if unit is model else expert_settings if unit in experts else settings
                _shard(unit, {**(own or settings), **ignored})
            if float8:
                params = (param for group in self._groups() for param in group.fsdp_params)
                self.float8 = Float8Gather(params, comm)
                for unit in self._units if self.float8 else ():
                    _call_with(unit, self.float8)
            if filling is not None:
                filling.allocate_shards(self._home)
            if self.pipeline is not None:
                self._replace_absent(device)
                self._root.set_requires_gradient_sync(False)
            for place in self._slots:
                now = place.module._parameters[place.name]
                if now is not None and now is not place.original:
                    self.changed[id(place.original)] = now
            self._staged = {id(now) for key, now in self.changed.items() if key in self._stages}
            if filling is not None:
                filling.fill_shards(self.changed)
            if self.pipeline is None:
                _state_of(model)._lazy_init()  # else the call of a unit before the model's would make it a root
                by_unit = {unit: groups_of(_state_of(unit)) for unit in self._units}
                self.visible = VisibleShards(by_unit, lambda: _state_of(model)._state_ctx.iter_forward_root is not None)
        except BaseException:
            self.abandon()
            raise

    def parameter_memory(self) -> dict[Any, tuple[Any, nn.Parameter]]:
        """Return the sharded parameters by the memory of the originals, which is kept until the result is released."""
        found = {sharded.memory_layout(slot.original): slot for slot in self._slots if slot.original is not None}
        found.pop(None, None)
        return {
            key: (slot.original.untyped_storage(), self.changed[id(slot.original)])
            for key, slot in found.items()
            if id(slot.original) in self.changed
        }

    def commit(self) -> None:
        """Free the full values. Nothing here can fail, so that either all ranks free them or none."""
        for place in self._slots:
            now = self.changed.get(id(place.original))
            if now is not None:
                if place.original.is_meta:
                    fill_parameter(place.original, torch.empty(0, dtype=now.dtype, device=self._home))
                if place.original.grad is not None and not sharded.is_absent(now):
                    now.grad = sharded.shard_like(now, sharded.own_shard(now, place.original.grad).clone())
                place.original.grad = None
                vars(now).update(_attributes_of(place.original))
                place.original.data = place.original.data.new_empty(0)
                sharded.record_replaced(place.original, now)

    def abandon(self) -> None:
        """Restore the model as it was before it was sharded, on this rank alone; before `commit`."""
        if self.float8 is not None:
            self.float8.undo()
        for unit, plain in zip(self._units, self._classes, strict=True):
            unit.__class__ = plain
        self._put_originals_back()
        if self.pipeline is not None:
            self.pipeline.undo()
        self._undo_divisions()

    def _undo_divisions(self) -> None:
        for division in (self.experts, self.sequences, self._layers):
            if division is not None:
                division.undo()
        for _, hook in self._hooked_tensors.values():
            hook.remove()

    @property
    def num_units(self) -> int:
        """The number of units that are gathered one at a time, including the rest of the model."""
        return len(self._units)

    def parameters(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield each sharded parameter that is still in the model with its original, in the order of the model."""
        here = {id(value) for value in self.model.parameters()}
        seen: set[int] = set()
        for place in self._slots:
            now = self.changed.get(id(place.original))
            if now is not None and id(now) in here and id(now) not in seen:
                seen.add(id(now))
                yield now, place.original

    def set_gradient_sync(self, enabled: bool) -> None:
        """Set whether the next backward passes average gradients; with stages they do so at their end."""
        if self.pipeline is None and enabled != self.syncs:
            self._root.set_requires_gradient_sync(enabled)
        self.syncs = enabled

    def keep_gathered(self) -> None:
        """Keep parameters gathered after backward passes, until `free_gathered`."""
        if not self._keeps_gathered:
            self._keeps_gathered = True
            self._root.set_reshard_after_backward(False)

    def free_gathered(self) -> None:
        """Undo `keep_gathered`."""
        if self._keeps_gathered:
            self._keeps_gathered = False
            self._root.set_reshard_after_backward(True)
            for group in self._groups():
                group.reshard()

    def free_interrupted(self) -> None:
        """Free parameters that a pass which did not end has left gathered."""
        for group in self._groups():
            group._to_sharded()

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gathered parameters that passes compute with, each with its name in the model."""
        for group in self._groups():
            for param in group.fsdp_params:
                if hasattr(param, "_unsharded_param"):
                    yield str(param._param_fqn), param._unsharded_param

    def find_lost_write(self) -> str | None:
        """Return the name of a gathered parameter that code has changed (the change is lost) since the last call."""
        for name, value in self.gathered():
            if value._version != self._versions.get(name, 0):  # gathering leaves it as it is
                self._versions[name] = value._version
                return name
        return None

    def register_outside_hooks(self) -> None:
        """Register hooks by which gradients of code outside of the model count once, and not once for each stage."""
        if self.pipeline is None:
            return
        gathered = (
            param._unsharded_param
            for group in self._groups()
            for param in group.fsdp_params
            if hasattr(param, "_unsharded_param") and not self.is_staged(param.sharded_param)
        )
        for value, gradient_hook in (
            *((value, self.pipeline.divide_outside_gradient) for value in gathered),
            *((value, self._average_outside) for value in self.scalars),
        ):
            if value.requires_grad and id(value) not in self._hooked_tensors:
                self._hooked_tensors[id(value)] = value, value.register_hook(gradient_hook)

    def _average_outside(self, gradient: Tensor) -> Tensor:
        if self.pipeline is not None and self.pipeline.is_backward_outside_model:
            return self._comm.all_reduce(gradient.clone(), "mean")
        return gradient

    def average_pending(self) -> None:
        """Average the gradients that backward passes have left on this rank; every rank must call.

        Gradients of a closed process group are dropped.
        """
        if not (self.is_pending or self._keeps_gathered):
            return
        self.is_pending = False
        if self.pipeline is None:
            self._average_groups()
            return
        # The gradient of a parameter that all stages hold is the sum over them; earlier gradients are whole already.
        common = [now for now, original in self.parameters() if id(original) not in self._stages]
        before = [now.grad for now in common]
        for now in common:
            now.grad = None
        self._average_groups()
        mesh, pp = self._mesh_groups.mesh, self._mesh_groups.pp
        for gradient in fill_missing_gradients(pp, common):
            pp.all_reduce(sharded.local_shard(gradient))
        for now, gradient in zip(common, before, strict=True):
            if gradient is not None:
                now.grad = gradient if now.grad is None else now.grad + gradient
        scalars = [(value, self.pipeline.collected.pop(id(value), None)) for value in self.scalars]
        are_found = torch.tensor([own is not None for _, own in scalars], dtype=torch.int32, device="cpu")
        for (value, own), is_found in zip(scalars, self._comm.all_reduce(are_found, "max").tolist(), strict=True):
            if is_found:
                own = torch.zeros_like(value) if own is None else own
                total = self._comm.all_reduce(own.detach()) / (mesh.size // mesh.pp)
                value.grad = total if value.grad is None else value.grad + total

    def average_outside_gradients(self) -> None:
        """Average the gradients of code that has computed with gathered parameters outside of a call of the model.

        A method other than ``forward`` does so after a call that was not followed by a backward pass.
        """
        if self.pipeline is None and not self._keeps_gathered and any(group.is_unsharded for group in self._groups()):
            self._average_groups()

    def _average_groups(self) -> None:
        for group in self._groups():
            if group._reduce_scatter_process_group not in distributed_c10d._world.pg_map:
                self.drop_pending()
                return
            if any(_is_pending(param) for param in group.fsdp_params):
                before = group.reduce_grads, group.all_reduce_grads
                group.reduce_grads = group.all_reduce_grads = True
                group.post_backward()
                group.finalize_backward()
                group._training_state = type(group._training_state).IDLE
                group.reduce_grads, group.all_reduce_grads = before

    def drop_pending(self) -> None:
        """Drop the gradients that backward passes have left on this rank."""
        self.is_pending = False
        if self.pipeline is not None:
            self.pipeline.collected.clear()
        for group in self._groups():
            for param in group.fsdp_params:
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
                if param.unsharded_accumulated_grad is not None:  # since 2.15 it is the gradient above
                    param.unsharded_accumulated_grad = None

    @torch.no_grad()
    def undo(self) -> dict[int, nn.Parameter]:
        """Restore the model, and return the original parameters by the ids of the sharded ones."""
        self.free_interrupted()
        if self.pipeline is not None:
            self.pipeline.share_buffers()
        back: dict[int, nn.Parameter] = {}
        pairs = list(self.parameters())
        has_gradient = any_rank_has_gradient(self._comm, [now for now, _ in pairs])
        for (now, original), is_needed in zip(pairs, has_gradient, strict=True):
            original.data = sharded.gather_full(now, self._comm)
            original.requires_grad_(now.requires_grad)
            if is_needed:
                gradient = (
                    sharded.shard_like(now, torch.zeros_like(sharded.local_shard(now)))
                    if now.grad is None
                    else now.grad
                )
                original.grad = sharded.gather_full(gradient, self._comm)
            for name in _attributes_of(original).keys() - vars(now).keys():
                delattr(original, name)
            for name, value in _attributes_of(now).items():
                whole = sharded.gather_full(value, self._comm) if sharded.is_sharded(value) else value
                setattr(original, name, whole)
            back[id(now)] = original
            sharded.record_replaced(now, original)
        if self.float8 is not None:
            self.float8.undo()
        for unit in self._units:
            unpatch_instance(unit)
        self._put_originals_back()
        if self.pipeline is not None:
            self.pipeline.undo()
        self._undo_divisions()
        return back

    def gather_new(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Replace tensors that code has computed from the model's parameters by full values; see `gather_new_parts`."""
        return gather_new_parts(self.model, {id(value) for value in self.changed.values()})

    def _divide_layers(self, plan: DivisionPlan, groups: MeshGroups, device: torch.device) -> None:
        """Replace the parameters of divided layers by this rank's shards, which `fully_shard` shards further."""
        here = [group for group in plan.groups if not self._is_absent(submodule_at(self.model, group.owner))]
        dims, mesh = divided_parameters(self.model, here), groups.mesh
        for place in self._slots:
            value = place.original
            if id(value) in dims:
                shard = shard_of(value, dims[id(value)], mesh.index("tp"), mesh.tp).to(device)
                divided = sharded.tensor_from_shard(shard, groups.device_mesh["tp"], dims[id(value)], value)
                place.module._parameters[place.name] = nn.Parameter(divided, value.requires_grad)
        self._layers = LayerDivision(self.model, here, LayerExchange(groups.tp), mesh.tp)
        self._classes = [type(unit) for unit in self._units]

    def _divide_experts(self, experts: Sequence[nn.Module], groups: MeshGroups, device: torch.device) -> None:
        """Replace the parameters of experts by slices for this rank's experts, which `fully_shard` shards further."""
        rank, size = groups.ep.world.rank, groups.ep.world.size
        for module in experts:
            for name, value in module._parameters.items():
                if value is not None:
                    shard = shard_of(value, 0, rank, size).to(device)
                    divided = sharded.tensor_from_shard(shard, groups.expert_mesh["ep"], 0, value)
                    module._parameters[name] = nn.Parameter(divided, value.requires_grad)
        exchange = TokenExchange(groups.ep, rank, size)  # pyright: ignore[reportArgumentType]
        self.experts = ExpertDivision(experts, exchange)
        self._classes = [type(unit) for unit in self._units]

    def _is_absent(self, module: nn.Module) -> bool:
        """Return whether other stages compute a module."""
        return any(id(value) in self._absent for value in module.parameters())

    def _divide_stages(self, stages: StagePlan, groups: MeshGroups, device: torch.device, micro_batches: int) -> None:
        root: Any = self.model
        self.pipeline = Pipeline(
            self.model,
            stages,
            groups,
            device,
            micro_batches=micro_batches,
            scalars=self.scalars,
            keep_gathered=lambda keeps: root.set_reshard_after_backward(not keeps),
        )
        self._classes = [type(unit) for unit in self._units]

    @property
    def scalars(self) -> list[nn.Parameter]:
        """The trained parameters without dimensions on this rank."""
        return [value for value in self.replicated if value.requires_grad]

    def is_staged(self, parameter: Tensor) -> bool:
        """Return whether one stage alone holds a parameter."""
        return id(parameter) in self._staged

    @property
    def _mesh_groups(self) -> MeshGroups:
        assert self._groups_of_ranks is not None, "several stages have a mesh"
        return self._groups_of_ranks

    def _replace_absent(self, device: torch.device) -> None:
        """Replace the parameters of other stages by sharded ones, empty on this rank; every rank must call."""
        mesh = self._mesh_groups.mesh
        own: dict[str, Any] = {}
        if not mesh.data_index and not mesh.index("tp"):
            own = {
                str(number): sharded.describe_placement(place.module._parameters[place.name])
                for number, place in enumerate(self._slots)
                if id(place.original) in self._stages and id(place.original) not in self._absent
            }
        placements = {int(key): found for of_rank in self._comm.all_gather_json(own) for key, found in of_rank.items()}
        made: dict[int, nn.Parameter] = {}
        for number, place in enumerate(self._slots):
            key = id(place.original)
            if key in self._absent:
                if key not in made:
                    value = sharded.absent_tensor(place.original.detach(), placements[number], device)
                    made[key] = nn.Parameter(value, place.original.requires_grad)
                place.module._parameters[place.name] = made[key]

    def _put_originals_back(self) -> None:
        for module in {id(place.module): place.module for place in self._slots}.values():
            _clean(module)
        for module in self._units:
            _clean(module)
        for place in self._slots:
            vars(place.original).pop("_fsdp_orig_uid", None)
            if sharded.is_sharded(place.module._parameters.get(place.name)):  # else code has removed or replaced it
                place.module._parameters[place.name] = place.original
        places = (place for place in self._slots if id(place.original) in self.changed)
        put_back_renamed(self.model, {id(self.changed[id(place.original)]): place.original for place in places})

    @property
    def _root(self) -> Any:
        return self.model

    def _groups(self) -> Iterator[Any]:
        for unit in self._units:
            yield from groups_of(_state_of(unit))

    @torch.no_grad()
    def _share_values(self, device: torch.device) -> None:
        for value in {id(p.original): p.original for p in self._slots if not p.original.is_meta}.values():
            if not value.is_contiguous():
                value.data = value.data.contiguous()
            self._comm.broadcast(value.data)
        for buffer in self.model.buffers():
            self._comm.broadcast(buffer)
        for value in self.replicated:
            value.data = value.data.to(device)


def _attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that code has set on a parameter, except torch's and this package's."""
    hidden = ("_accel_nb", "_fsdp", "_is_param")
    return {name: value for name, value in vars(parameter).items() if not name.startswith(hidden)}


def _shard(unit: nn.Module, settings: dict[str, Any]) -> None:
    plain = type(unit)
    fully_shard(unit, **settings)
    if plain.__module__ != unit.__class__.__module__ or PLAIN_CLASS in vars(plain):
        _unregister_class(plain)
    for module in unit.modules():
        # Marks for old versions of torch.compile, which would reach the notebook as attributes of the user's module.
        for name in _MARKS[:2]:
            vars(module).pop(name, None)
        # The hook is for load_state_dict(assign=True), which is refused, and cannot be copied.
        _drop_hooks(module, ("_load_state_dict_post_hooks",))
    for group in groups_of(_state_of(unit)):
        adapt_group(group, unit)
    unit.register_forward_pre_hook(_require_process(os.getpid()), prepend=True)
    patch_instance(unit, _methods_over(plain), plain)


def _require_process(pid: int) -> Callable[[nn.Module, Any], None]:
    """Return a hook that raises `MisuseError` in other processes, where a gather would never end."""

    def check(module: nn.Module, arguments: Any) -> None:
        if os.getpid() != pid:
            raise MisuseError(
                f"a {type(module).__name__} is called in another process than that of its rank, such as one of a "
                "DataLoader, where the shards of its weights cannot be gathered: use num_workers=0, or train with "
                "`--strategy ddp`, which leaves weights whole"
            )

    return check


def _call_with(unit: nn.Module, gather: Float8Gather) -> None:
    """Make calls of a unit compute the scales of the weights that are gathered for it."""
    made: Any = type(unit)
    made.__call__ = gather.with_scales(made.__call__)


def _unregister_class(plain: type) -> None:
    """Remove the class of one instance from the registry of `fully_shard`."""
    from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls

    cls_to_fsdp_cls.pop(plain, None)


def _is_pending(param: Any) -> bool:
    """Return whether this rank holds a gradient that is not averaged, in the dtype of averaging or of the parameter."""
    return param.unsharded_accumulated_grad is not None or (
        hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None
    )


def _state_of(unit: nn.Module) -> Any:
    return _composable_state._get_module_state(unit)


def _methods_over(plain: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods of a sharded module that differ from its plain class."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        """Refuse objects of a class that code derives from this one, as libraries of functional models do."""
        raise MisuseError(
            f"{cls.__name__} is derived from the class of a sharded {plain.__name__}: its objects would "
            "compute with shards of the weights. Train with `--strategy ddp`, which leaves weights whole"
        )

    def named_parameters(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the sharded parameters, also after an evaluation that has left some gathered."""
        _reshard_idle(self)
        return plain.named_parameters(self, *args, **kwargs)

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the sharded parameters, or full ones to library code if all ranks read together.

        On one device the values share memory with the parameters, as the sharded ones do here. Libraries read values by
        their memory, so they get full values, which are kept equal to the parameters. So does code that cannot compute
        with sharded tensors.
        """
        _reshard_idle(self)
        state = plain.state_dict(self, *args, **kwargs)
        computes = sharded.copies() is not None and is_user_module(sys._getframe(1).f_globals.get("__name__"))
        if sharded.can_read_full() and not computes and not args and kwargs.get("destination") is None:
            gather_state(self, state)
        return state

    def load_state_dict(self: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors; each rank uses its shard."""
        if assign:
            raise MisuseError("load_state_dict(assign=True) would replace sharded parameters: call it without assign")
        return plain.load_state_dict(self, shard_state_dict(self, state_dict), strict)

    return {
        "__new__": __new__,
        "__reduce_ex__": _reduce,
        "_accel_nb_reduce": _reduce_in_place,
        "__deepcopy__": _deepcopy,
        "named_parameters": named_parameters,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
    }


def _reshard_idle(unit: Any) -> None:
    """Free gathered parameters if no computation uses them."""
    for state in _state_of(unit)._state_ctx.all_states:
        if state._training_state.name == "IDLE":
            for group in groups_of(state):
                group.reshard()


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Reduce to a plain copy with whole parameters."""
    return _deepcopy(self, {}).__reduce_ex__(protocol)


def _reduce_in_place(self: nn.Module, protocol: Any = 5) -> Any:
    """Reduce to an object of the plain class with the same parameters, which the pickler reads whole."""
    sharded.require_reader()
    make, arguments, state, *rest = without_class_check(reduce_as_innermost(self, protocol))
    return make, arguments, _without_marks(state), *rest


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a plain copy with whole parameters."""
    _reshard_idle(self)
    for _, value in nn.Module.named_parameters(self):  # classes may have their own `parameters`
        if sharded.is_sharded(value) and id(value) not in memo:
            memo[id(value)] = nn.Parameter(sharded.full_tensor(value), value.requires_grad)
    make, arguments, state, *_ = _reduce_in_place(self, 4)
    memo[id(self)] = twin = make(*arguments)
    twin.__setstate__(copy.deepcopy(state, memo))
    return twin


def _without_marks(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    kept = {name: value for name, value in state.items() if name not in _MARKS}
    for name in _HOOKS:
        if name in kept:
            kept[name] = OrderedDict((key, hook) for key, hook in kept[name].items() if not _is_of_wrapper(hook))
        for extra in (f"{name}_with_kwargs", f"{name}_always_called"):
            if extra in kept:  # a later hook may have the number of a removed one
                kept[extra] = OrderedDict((key, flag) for key, flag in kept[extra].items() if key in kept[name])
    return kept


def _clean(module: nn.Module) -> None:
    """Remove everything that `fully_shard` has added to a module."""
    _drop_hooks(module, _HOOKS)
    for name in _MARKS:
        vars(module).pop(name, None)
    _composable_state._module_state_mapping.pop(module, None)


def _drop_hooks(module: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        hooks = vars(module)[name]
        for key in [key for key, hook in hooks.items() if _is_of_wrapper(hook)]:
            del hooks[key]
            for extra in (f"{name}_with_kwargs", f"{name}_always_called"):
                vars(module).get(extra, {}).pop(key, None)


def _is_of_wrapper(hook: Any) -> bool:
    """Return whether a hook belongs to `fully_shard`, a `Pipeline` or this module; copies of a model do not get it."""
    module = str(getattr(getattr(hook, "hook", hook), "__module__", ""))
    return module.startswith((_SOURCE, Pipeline.__module__, VisibleShards.__module__, __name__))
