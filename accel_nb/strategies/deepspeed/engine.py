"""Models and their optimizer in a DeepSpeed engine, and their restoration.

The engine divides what an optimizer steps: it flattens parameters, and each rank steps a part of the flat tensors. Here
the engine steps a copy of the optimizer, so that the user's optimizer keeps the model's parameters and its learning
rate can be set as before; its state shows this rank's parts. Models stay the same objects. All uses of undocumented
parts of DeepSpeed are in this file and in `process_setup`.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import deepspeed
import torch
from deepspeed.runtime.zero import parameter_offload
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.sharded import FlatPart
from accel_nb.runtime.tensors.instance_patching import innermost_class
from accel_nb.runtime.tensors.state_tree import map_state
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.strategies.base import LOST_WRITE
from accel_nb.strategies.deepspeed.partitioned_parameter import Passes, mark_partitioned, unmark_partitioned
from accel_nb.strategies.fsdp.meta_weights import WeightFilling, fill_parameter

_OF_INSTANCE = ("step", "zero_grad")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_SINGLE = ("step", "eta", "mu", "mu_product")
_LATER = ("ds_grads_remaining", "applied_pre_backward_ref_cnt")


@dataclass(frozen=True, slots=True)
class _FlatSlot:
    """The position of this rank's part of a parameter in a flat tensor: the index of its first element."""

    parameter: nn.Parameter
    start: int
    part: FlatPart


class ZeroModel:
    """Divided models of one optimizer: making it divides, `undo` restores. Every rank must do both.

    Weights must be the same on all ranks. In stage 3 those without values come from ``fillings``, of which each rank
    reads its part.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: Optimizer,
        settings: dict[str, Any],
        comm: Communicator,
        fillings: Sequence[WeightFilling] = (),
    ) -> None:
        self.models = tuple(models)
        self.optimizer = optimizer
        self.settings = settings
        self.has_gradients = False
        self.passes = Passes()
        self._is_stepped = False
        # By the parameter's id: gradients that were read or replaced, and those that were set to None.
        self._whole_gradients: dict[int, Tensor] = {}
        self._dropped: set[int] = set()
        # Bytes of gradients when the last window closed.
        self.gradient_bytes = 0
        self._comm = comm
        self._stage: int = settings["zero_optimization"]["stage"]
        self._offloads = "offload_optimizer" in settings["zero_optimization"]
        self._parameters: list[Any] = list(
            {id(value): value for model in models for value in model.parameters()}.values()
        )
        whole = models[0] if len(models) == 1 else nn.ModuleList(models)
        if self._stage < 3:  # only what is stepped is changed: another optimizer may step the rest of a model
            stepped = set(map(id, stepped_parameters(optimizer)))
            self._parameters = [value for value in self._parameters if id(value) in stepped]
            whole = nn.ParameterList(self._parameters)
        self._modules = list(whole.modules())
        self._known_names = {id(item): set(vars(item)) for item in (*self._modules, *self._parameters)}
        chosen = _groups_of(optimizer, {id(v) for v in self._parameters if v.requires_grad and v.numel()})
        # Which of the optimizer's groups each of the inner one's belongs to.
        self._indices = [index for index, _ in chosen]
        self._num_groups = len(optimizer.param_groups)
        before = [
            (value, value.data, value.grad, set(value._post_accumulate_grad_hooks or ()))
            for value in self._parameters
            if not value.is_meta
        ]
        hooks = [(part, name, set(vars(part)[name])) for part in self._modules for name in _HOOKS]
        state = {value: dict(entries) for value, entries in optimizer.state.items()}
        try:
            self._divide(whole, _twin_of(optimizer, chosen), fillings)
        except BaseException:
            self._remove_attributes()
            for value, data, gradient, known in before:
                sharded.unregister_flat_part(value)
                value.data, value.grad = data, gradient
                for key in set(value._post_accumulate_grad_hooks or ()) - known:
                    del value._post_accumulate_grad_hooks[key]
            for part, name, known in hooks:
                _drop_hooks(part, name, known)
            optimizer.state.clear()
            optimizer.state.update(state)
            raise

    def _divide(self, whole: nn.Module, inner: Optimizer, fillings: Sequence[WeightFilling]) -> None:
        """Make an engine that divides the parameters."""
        for value in self._parameters:
            value.grad = None
        for filling in fillings:
            self._fill(filling)
        with _without_broadcast(self._parameters):
            self._engine: Any = deepspeed.initialize(model=whole, optimizer=inner, config=self.settings)[0]
        self._zero: Any = self._engine.optimizer
        self._zero.unregister_grad_acc_post_hooks()  # `end_backward` does it, also on ranks where no hook was called
        if self._stage < 3:
            self._engine.module_forward_pre_hook.remove()
            self._engine.module_forward_post_hook.remove()
        else:  # clipping computes the norm, once; in the other stages `compute_grad_norm` switches this off
            norm = torch.zeros((), device=self._comm.world.device)
            self._zero._get_norm_groups = lambda: [norm]
        self._flats: list[tuple[Any, list[_FlatSlot]]] = list(self._find_flats())
        self._parts = {id(place.parameter): place.part for _, places in self._flats for place in places}
        for part in self._modules:
            if new := set(vars(part)) - self._known_names[id(part)]:
                vars(part)["_accel_nb_hidden"] = frozenset({*new, *_LATER})
        for value in self._parameters:
            value.__getstate__ = dict  # type: ignore[method-assign]  # pickled without what DeepSpeed keeps on it
            if self._stage == 3:
                sharded.register_flat_part(value, self._part_of(value, value.ds_tensor))
        if self._stage == 3:
            mark_partitioned(self._parameters, self.passes)
        self._load_state(self.optimizer.state)
        self._versions = self._version()
        # Entries that a flat part has once, such as a step count, are copied whenever the state is read.
        self._on_read = [
            self.optimizer.register_state_dict_pre_hook(lambda _: self._show_singles()),
            self.optimizer.register_state_dict_post_hook(_gather_state),
        ]

    @property
    def divides_weights(self) -> bool:
        """Whether this rank holds a part of the weights only."""
        return self._stage == 3

    @property
    def inner(self) -> Any:
        """The optimizer that steps this rank's flat parts."""
        return self._zero.optimizer

    @property
    def master_bytes(self) -> int:
        """Bytes of the copies of weights that this rank steps; 0 where it steps those of the model."""
        shown = {value.ds_tensor.untyped_storage().data_ptr() for value in self._parameters} if self._stage == 3 else ()
        return sum(flat.nbytes for flat, _ in self._flats if flat.untyped_storage().data_ptr() not in shown)

    def begin_backward(self) -> None:
        """Prepare a backward pass, whose gradients are added to existing ones."""
        self._refuse_partly_dropped()
        self._store_whole_gradients()
        self._is_stepped = False
        self._dropped.clear()
        self._engine.set_gradient_accumulation_boundary(False)
        self._zero.clear_backward_seen_flag()
        if self._stage == 3:
            self._zero.micro_step_id = 1  # add: `_zero_sums` has set all to zero
        self._zero.backward_prologue()
        self._zero.enter_backward()

    @property
    def is_reached(self) -> bool:
        """Whether the backward pass has computed gradients of these models on this rank."""
        return self._zero._backward_hook_state.hooks_fired_this_backward > 0

    def end_backward(self, *, is_reached: bool) -> None:
        """Average the rest of the gradients, if the stage divides gradients; every rank must call.

        ``is_reached``: whether there are new gradients on any rank.
        """
        if not is_reached:
            self._zero.exit_backward()
            return
        self.has_gradients = True
        if self._stage < 3:
            self._zero.setup_buckets()  # DeepSpeed does it when it receives a gradient, which not every rank may have
        if self._stage > 1:
            self._engine.allreduce_gradients()
        self._zero.backward_epilogue()
        self._zero.exit_backward()

    def finish_gradients(self) -> None:
        """Average what is not averaged yet, and prepare this rank's part for `gradients`; every rank calls."""
        held = [value.nbytes for value in self._parameters if value.requires_grad]
        self.gradient_bytes = sum(held) if self._stage == 1 else sum(flat.nbytes for flat, _ in self._flats)
        if self._stage == 1:
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.allreduce_gradients()
            self._engine.set_gradient_accumulation_boundary(False)
        else:
            self._zero.finalize_gradient_accumulation_boundary()

    def steps(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer steps a parameter."""
        return id(parameter) in self._parts

    def read_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the whole gradient of a parameter after `finish_gradients`; changes of it have effect.

        Every rank must call. Raises `MisuseError` after the step, which leaves no gradients.
        """
        if self._is_stepped:
            raise MisuseError(_AFTER_STEP)
        if not self.has_gradients or id(parameter) in self._dropped:
            return None
        if id(parameter) not in self._whole_gradients:
            own = dict(self._gradient_parts())
            held = own[parameter] if parameter in own else self._flats[0][0].new_empty(0)
            part = sharded.register_flat_part(held.detach().view(-1), self._parts[id(parameter)])
            self._whole_gradients[id(parameter)] = sharded.gather_full(part, self._comm)
        return self._whole_gradients[id(parameter)]

    def write_gradient(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace the whole gradient of a parameter; None drops it. Raises `MisuseError` if there are no gradients."""
        self._whole_gradients.pop(id(parameter), None)
        if value is None:
            self._dropped.add(id(parameter))
            if self._dropped >= self._parts.keys():
                self.drop_gradients()
        elif not self.has_gradients:
            raise MisuseError(_NO_BACKWARD)
        else:
            self._dropped.discard(id(parameter))
            self._whole_gradients[id(parameter)] = value

    def _refuse_partly_dropped(self) -> None:
        if self.has_gradients and self._dropped:
            raise MisuseError(_PARTLY_DROPPED.format(dropped=len(self._dropped), all=len(self._parts)))

    def _store_whole_gradients(self) -> None:
        """Copy this rank's parts of the gradients that were read, and may have been changed, to where they are held."""
        whole, self._whole_gradients = self._whole_gradients, {}
        if whole:
            for parameter, held in self._gradient_parts():
                if id(parameter) in whole:
                    part = self._parts[id(parameter)]
                    own = whole[id(parameter)].detach().reshape(-1).narrow(0, *part.ranges[part.rank])
                    held.view(-1).copy_(own)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield this rank's part of each gradient, flat, after `finish`; changes in place have effect."""
        self._store_whole_gradients()
        yield from self._gradient_parts()

    def _gradient_parts(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if not self.has_gradients:
            return
        for number, (flat, places) in enumerate(self._flats):
            if self._offloads:
                yield from ((place.parameter, _narrow(flat.grad, place)) for place in places)
            elif self._stage == 3:
                for place, value in zip(places, self._zero.averaged_gradients.get(number) or (), strict=False):
                    yield place.parameter, value.view(-1)[: place.part.ranges[place.part.rank][1]]
            else:
                averaged = self._zero.averaged_gradients.get(number) or ()
                parts = [value for value in averaged if not getattr(value, "_zero_padding", False)]
                here = self._zero.params_in_partition[number]
                yield from zip(here, parts, strict=False)

    def step(self) -> bool:
        """Step this rank's part, and gather the result; return False if DeepSpeed skipped the step."""
        if len(self.optimizer.param_groups) != self._num_groups:
            raise MisuseError(
                f"the {type(self.optimizer).__name__} has {len(self.optimizer.param_groups)} groups, and had "
                f"{self._num_groups} when it was prepared: DeepSpeed divides them once. Prepare model and optimizer "
                "anew after add_param_group (free_memory(model, optimizer) first)"
            )
        self._apply_loaded()
        if not self.has_gradients:
            return True
        self._refuse_partly_dropped()
        self._store_whole_gradients()
        for group, index in zip(self.inner.param_groups, self._indices, strict=True):
            outer = self.optimizer.param_groups[index]
            group.update({name: value for name, value in outer.items() if name != "params"})
        self._zero.step()
        self._zero_sums()
        self._is_stepped = True
        if not self._is_shown:
            self._show_parts()
        self._versions = self._version()
        return not self._zero.overflow

    def drop_gradients(self) -> None:
        """Drop gradients."""
        self._is_stepped = False
        self._dropped.clear()
        if self.has_gradients:
            self._zero.zero_grad(set_to_none=True)
            for number in range(len(self._flats)):
                self._zero.averaged_gradients[number] = None
                if self._stage < 3:
                    self._zero.all_grad_tensors[number] = None
            if self._stage < 3:
                self._zero.micro_step_id = -1
                for value in self._parameters:
                    value.grad_accum = None  # type: ignore[attr-defined]
                if self._offloads:
                    self._zero.reset_cpu_buffers()
                    self._zero._offload_accumulated_param_ids = set()
            self._zero_sums()

    def load_optimizer(self, states: Mapping[nn.Parameter, Mapping[str, Any]], whole: Callable[[Any], Any]) -> None:
        """Load the optimizer's state from ``states``; ``whole`` reads one of its tensors. Every rank must call."""
        self.optimizer.state.clear()
        self.inner.state.clear()
        self._load_state(states, whole)

    def undo(self) -> None:
        """Restore models and optimizer; every rank must call."""
        self._apply_loaded()
        self._show_singles()
        for hook in self._on_read:
            hook.remove()
        weights = [sharded.gather_full(value, self._comm) for value in self._parameters] if self._stage == 3 else []
        states = {
            parameter: {
                name: sharded.gather_full(value, self._comm) if sharded.is_sharded(value) else value
                for name, value in self.optimizer.state.get(parameter, {}).items()
            }
            for _, places in self._flats
            for parameter in [place.parameter for place in places]
        }
        self._engine.destroy()
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        stack = parameter_offload.FWD_MODULE_STACK
        stack[:] = [item for item in stack if item is not self._engine.module]
        for value in self._parameters:
            sharded.unregister_flat_part(value)
        unmark_partitioned(self._parameters)
        for value, found in zip(self._parameters, weights or [v.data.clone() for v in self._parameters], strict=True):
            value.data = found
            value.grad = None
        self._remove_attributes()
        for parameter, values in states.items():
            if values:
                self.optimizer.state[parameter] = values

    def _remove_attributes(self) -> None:
        """Remove the attributes that DeepSpeed has set on modules and parameters."""
        for item in (*self._modules, *self._parameters):
            names = vars(item)
            if "_original_parameters" in names:
                original = names["_original_parameters"]
                original.clear()
                original.update(names["_parameters"].items())
                names["_parameters"] = original
            for name in set(names) - self._known_names[id(item)]:
                del names[name]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make parameters whole in the block, and keep what the block writes into them; every rank must call."""
        if self._stage < 3:
            yield
            return
        before = [value.data for value in self._parameters]
        for value in self._parameters:
            value.data = sharded.gather_full(value, self._comm)
        try:
            yield
        finally:
            for value, data in zip(self._parameters, before, strict=True):
                sharded.local_part(value).copy_(sharded.own_part(value, value.data))
                value.data = data

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of the parameters."""
        return any(value is tensor for value in self._parameters)

    @contextmanager
    def without_writes(self) -> Iterator[None]:
        """Raise `MisuseError` if the block writes to parameters; what it writes is not copied into the parts."""
        before = [value._version for value in self._parameters]
        yield
        for value, version in zip(self._parameters, before, strict=True):
            if value._version != version:
                named = (name for model in self.models for name, other in model.named_parameters() if other is value)
                raise MisuseError(LOST_WRITE.format(name=next(named, "a parameter")))

    def reload_changed_weights(self) -> None:
        """Update DeepSpeed's copies of the weights if other code has changed the weights; every rank must call."""
        if self._version() == self._versions:
            return
        if self._stage == 3 and self._zero.persistent_parameters:
            for value in self._zero.persistent_parameters:
                value.partition()
            self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)
        self._zero.refresh_fp32_params()
        self._versions = self._version()

    def copy_of(self, model: nn.Module, *, is_whole: bool = False) -> nn.Module:
        """Return a copy of one of these models, without anything of DeepSpeed's, that has the same parameters.

        With ``is_whole`` parameters of which this rank holds a part are replaced by whole ones.
        """
        known: dict[int, Any] = {}
        for value in model.parameters() if is_whole else ():
            if sharded.is_sharded(value):
                known[id(value)] = nn.Parameter(sharded.full_tensor(value), value.requires_grad)
        return _twin(model, known, {})

    @torch.no_grad()
    def _fill(self, filling: WeightFilling) -> None:
        """Divide parameters without values, one at a time, and read this rank's part of each."""
        theirs = deepspeed.zero.Init(config_dict_or_path=self.settings, mem_efficient_linear=False)
        empty: list[Any] = list(filling.parameters())
        for value in empty:
            fill_parameter(
                value, torch.empty(value.shape, dtype=value.dtype, device="cpu")
            )  # freed before it is written to
            theirs._convert_to_deepspeed_param(value)
            value.partition()
            start, length = self._part_of(value, None).ranges[self._comm.world.rank]
            values = torch.empty(length, dtype=value.dtype, device="cpu")
            filling.fill_elements(value, start, values)
            value.ds_tensor[:length].copy_(values)

    # --- positions in flat tensors ---

    def _find_flats(self) -> Iterator[tuple[Tensor, list[_FlatSlot]]]:
        """Yield the flat tensors that this rank steps, each with the parameters in it."""
        zero, world = self._zero, self._comm.world
        if self._stage == 3:
            for flat, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
                start, places = 0, []
                for value in parameters:
                    places.append(_FlatSlot(value, start, self._part_of(value, None)))
                    start += value.partition_numel()
                yield flat, places
            return
        for flat, parameters in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
            size, offset, places = flat.numel(), 0, []
            for value in parameters:
                ranges = []
                for rank in range(world.size):
                    low, high = max(offset, rank * size), min(offset + value.numel(), (rank + 1) * size)
                    ranges.append((low - offset, high - low) if high > low else (0, 0))
                part = FlatPart(tuple(value.shape), tuple(ranges), world.rank)
                places.append(_FlatSlot(value, min(max(0, offset - world.rank * size), size), part))
                offset += value.numel()
            yield flat, places

    def _part_of(self, value: Any, held: Tensor | None) -> FlatPart:
        size, world = value.partition_numel(), self._comm.world
        starts = [min(rank * size, value.ds_numel) for rank in range(world.size)]
        ranges = [(start, min(size, value.ds_numel - start)) for start in starts]
        return FlatPart(tuple(value.ds_shape), tuple(ranges), world.rank, held)

    # --- the optimizer's state ---

    def _apply_loaded(self) -> None:
        """Apply what was loaded into the model or the optimizer since the last step."""
        self.reload_changed_weights()
        if self.optimizer.state is not self._seen and any(self.optimizer.state.values()):
            states = {value: dict(entries) for value, entries in self.optimizer.state.items()}
            self.inner.state.clear()
            self._load_state(states)

    def _load_state(
        self, states: Mapping[Any, Mapping[str, Any]], whole: Callable[[Any], Any] = lambda value: value
    ) -> None:
        """Copy state, by parameter, into the flat tensors; missing entries count as zero."""
        for flat, places in self._flats:
            known = [states[place.parameter] for place in places if states.get(place.parameter)]
            if not known:
                continue
            counts = {float(whole(entries["step"])) for entries in known if "step" in entries}
            if len(counts) > 1:
                raise MisuseError(
                    f"parameters of one group of the {type(self.optimizer).__name__} were stepped "
                    f"{sorted(counts)} times, and DeepSpeed counts once for all: load this state before preparing, "
                    "or train by fsdp"
                )
            for name, example in known[0].items():
                if not self._has_elements(name, places, states):
                    single = whole(example)
                    self.inner.state[flat][name] = single.clone() if isinstance(single, Tensor) else single
                    continue
                buffer = self.inner.state[flat][name] = torch.zeros_like(flat, requires_grad=False)
                for place in places:
                    value = states.get(place.parameter, {}).get(name)
                    if value is None:
                        continue
                    value = whole(value)
                    start, length = place.part.ranges[place.part.rank]
                    own = sharded.local_part(value) if sharded.is_sharded(value) else value.reshape(-1)[start:][:length]
                    _narrow(buffer, place).copy_(own)
        self._show_parts()

    @staticmethod
    def _has_elements(name: str, places: list[_FlatSlot], states: Mapping[Any, Mapping[str, Any]]) -> bool:
        """Return whether an entry of the state has one number for each element of a parameter."""
        found = [
            (place.part.shape, states[place.parameter].get(name)) for place in places if states.get(place.parameter)
        ]
        sized = [(shape, value) for shape, value in found if shape and value is not None]
        if not sized:
            return name not in _SINGLE
        return any(hasattr(value, "shape") and _shape_of(value) == shape for shape, value in sized)

    def _show_parts(self) -> None:
        """Set this rank's parts of the state in the user's optimizer."""
        state = self._seen = self.optimizer.state
        self._is_shown = any(self.inner.state.values())
        for flat, places in self._flats:
            for name, value in self.inner.state.get(flat, {}).items():
                for place in places:
                    state[place.parameter][name] = (
                        _copy_single(value)
                        if _is_single(value, flat)
                        else sharded.register_flat_part(_narrow(value, place), place.part)
                    )

    def _show_singles(self) -> None:
        for flat, places in self._flats:
            for name, value in self.inner.state.get(flat, {}).items():
                if _is_single(value, flat):
                    for place in places:
                        self.optimizer.state[place.parameter][name] = _copy_single(value)

    def _zero_sums(self) -> None:
        """Set sums of gradients to zero that DeepSpeed would add to."""
        self.has_gradients = False
        self._whole_gradients.clear()
        self._dropped.clear()
        if self._stage == 3:
            self._zero.grad_partitions_flat_buffer.zero_()
        if self._offloads:
            for flat, _ in self._flats:
                flat.grad.zero_()

    def _version(self) -> tuple[int, ...]:
        """Return version counters, which change when code other than DeepSpeed writes into the weights."""
        held = [value.ds_tensor for value in self._parameters] if self._stage == 3 else self._parameters
        return tuple([value._version for value in held])


_AFTER_STEP = (
    "parameter.grad is read after the step, for which DeepSpeed uses up the gradients: read it between backward() and "
    "optimizer.step(), or train with --strategy ddp"
)
_NO_BACKWARD = (
    "parameter.grad is assigned without a backward pass, and DeepSpeed steps only gradients that a backward pass has "
    "left: train with --strategy ddp"
)
_PARTLY_DROPPED = (
    "{dropped} of {all} gradients were set to None, and DeepSpeed steps all parameters of an optimizer: "
    "give the others an optimizer of their own, or train with --strategy ddp"
)


@contextmanager
def _without_broadcast(parameters: Sequence[Any]) -> Iterator[None]:
    """Mark parameters so that DeepSpeed does not broadcast them: it fails for those of a single number."""
    for value in parameters:
        value.ds_optim_param = None
    try:
        yield
    finally:
        for value in parameters:
            del value.ds_optim_param


def _groups_of(optimizer: Optimizer, own: set[int]) -> list[tuple[int, list[nn.Parameter]]]:
    """Return the parameters of an optimizer that are in ``own``, each list with the number of its group.

    A group is split where its parameters have different step counts: a flat part has one count.
    """
    found: list[tuple[int, list[nn.Parameter]]] = []
    for index, group in enumerate(optimizer.param_groups):
        alike: dict[Any, list[nn.Parameter]] = {}
        for value in group["params"]:
            if id(value) in own:
                step = optimizer.state.get(value, {}).get("step")
                alike.setdefault(None if step is None else float(step), []).append(value)
        found += [(index, values) for values in alike.values()]
    return found


def _twin_of(optimizer: Optimizer, chosen: Sequence[tuple[int, list[nn.Parameter]]]) -> Optimizer:
    """Return a copy of an optimizer for the chosen parameters, by the number of their group, without state."""
    twin = object.__new__(type(optimizer))
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name not in _OF_INSTANCE})
    twin.state = defaultdict(dict)
    twin.param_groups = [{**optimizer.param_groups[index], "params": values} for index, values in chosen]
    return twin


def _narrow(flat: Tensor, place: _FlatSlot) -> Tensor:
    return flat.detach().narrow(0, place.start, place.part.ranges[place.part.rank][1])


def _copy_single(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _gather_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Replace parts of tensors by whole ones where all ranks gather, as in a plain cell, whose code may save them."""
    if not sharded.can_read_full():
        return None
    whole = map_state(lambda leaf: sharded.full_tensor(leaf) if sharded.is_sharded(leaf) else leaf, state_dict)
    return cast(dict[str, Any], whole)


def _is_single(value: Any, flat: Tensor) -> bool:
    """Return whether an entry of the state is one for all of a flat tensor, and not one number for each element."""
    return not isinstance(value, Tensor) or value.shape != flat.shape


def _shape_of(value: Any) -> tuple[int, ...]:
    return sharded.full_shape(value) if isinstance(value, Tensor) else tuple(value.shape)


def _twin(module: nn.Module, parameters: dict[int, Any], done: dict[int, nn.Module]) -> nn.Module:
    """Return a copy of a tree of modules with other parameters, and without what an engine has set on it."""
    if id(module) in done:
        return done[id(module)]
    twin = done[id(module)] = object.__new__(innermost_class(module))
    hidden = {"_accel_nb_hidden", *vars(module).get("_accel_nb_hidden", ())}
    kept = {name: value for name, value in vars(module).items() if name not in hidden}
    held = module._parameters.items()
    kept["_parameters"] = {name: parameters.get(id(value), value) for name, value in held}
    kept["_modules"] = {
        name: None if part is None else _twin(part, parameters, done) for name, part in module._modules.items()
    }
    for name in _HOOKS:
        kept[name] = OrderedDict((key, hook) for key, hook in kept[name].items() if not _is_of_deepspeed(hook))
        for extra in (f"{name}_with_kwargs", f"{name}_always_called"):
            if extra in kept:
                kept[extra] = OrderedDict((key, flag) for key, flag in kept[extra].items() if key in kept[name])
    vars(twin).update(kept)
    return twin


def _drop_hooks(module: nn.Module, name: str, known: set[int]) -> None:
    hooks = vars(module)[name]
    for key in set(hooks) - known:
        del hooks[key]
        for extra in (f"{name}_with_kwargs", f"{name}_always_called"):
            vars(module).get(extra, {}).pop(key, None)


def _is_of_deepspeed(hook: Any) -> bool:
    function = hook.func if hasattr(hook, "func") else hook
    return isinstance(function, types.FunctionType) and function.__module__.startswith("deepspeed.")
