"""Models and their optimizer in a DeepSpeed engine, and their restoration.

The engine shards the parameters of an optimizer: it flattens them, and each rank steps a shard of the flat tensors.
Here the engine steps a copy of the optimizer, so that the user's optimizer keeps the model's parameters and its
learning rate can be set as before; its state shows this rank's shards. Models stay the same objects. All uses of
undocumented parts of DeepSpeed are in this file, in `flat_shards`, `plain_modules` and `process_setup`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import parameter_offload
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.held_gradients import register_holder, unregister_holder
from accel_nb.runtime.process.user_code import warn_at_user_line
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.strategies.base import LOST_WRITE, multiply_tensors
from accel_nb.strategies.deepspeed.flat_shards import find_flat_tensors, shard_of
from accel_nb.strategies.deepspeed.flat_state import FlatState
from accel_nb.strategies.deepspeed.inner_optimizer import copy_attributes, copy_optimizer, split_groups
from accel_nb.strategies.deepspeed.partitioned_parameter import Passes, mark_partitioned, unmark_partitioned
from accel_nb.strategies.deepspeed.plain_modules import (
    HOOKS,
    copy_module,
    drop_hooks,
    hide_attributes,
    remove_attributes,
    remove_hidden,
    visible_attributes,
)
from accel_nb.strategies.deepspeed.whole_gradients import WholeGradients
from accel_nb.strategies.deepspeed.whole_states import WholeStates
from accel_nb.strategies.fsdp.meta_weights import WeightFilling, fill_parameter


class ZeroModel:
    """The sharded models of one optimizer: the constructor shards them, `undo` restores them.

    Every rank must call both. Weights must be the same on all ranks. In stage 3 each rank reads its shards of models on
    the meta device from ``fillings``.
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
        # DeepSpeed has skipped the last step.
        self.has_overflowed = False
        self.passes = Passes()
        self.states = WholeStates()
        # Whether the gradients are complete, and where `gradients` finds them.
        self._is_finished = False
        # This rank's shards of complete gradients, to which later passes add; DeepSpeed has the gradients of these.
        self._earlier: list[Tensor] = []
        # Whether DeepSpeed has sums of gradients, of passes since `_earlier`.
        self._has_sums = False
        # How many gradients passes and code have left on this rank since they were dropped.
        self._num_reached = 0
        self._has_warned = False
        # Bytes of gradients when the last window closed.
        self.gradient_bytes = 0
        self._comm = comm
        self._stage: int = settings["zero_optimization"]["stage"]
        self._offloads = "offload_optimizer" in settings["zero_optimization"]
        self._parameters: list[Any] = list(
            {id(value): value for model in models for value in model.parameters()}.values()
        )
        self._ids = {id(value) for value in self._parameters}
        whole = models[0] if len(models) == 1 else nn.ModuleList(models)
        if self._stage < 3:  # only stepped parameters are changed: another optimizer may step the rest of a model
            stepped = set(map(id, stepped_parameters(optimizer)))
            self._parameters = [value for value in self._parameters if id(value) in stepped]
            self._ids &= stepped
            whole = nn.ParameterList(self._parameters)
        self._modules = list(whole.modules())
        self._known_names = {id(item): set(vars(item)) for item in (*self._modules, *self._parameters)}
        chosen = split_groups(optimizer, {id(v) for v in self._parameters if v.requires_grad and v.numel()})
        # Which of the optimizer's groups each of the inner one's belongs to.
        self._indices = [index for index, _ in chosen]
        self._num_groups = len(optimizer.param_groups)
        before = [
            (value, value.data, value.grad, set(value._post_accumulate_grad_hooks or ()))
            for value in self._parameters
            if not value.is_meta
        ]
        hooks = [(module, name, set(vars(module)[name])) for module in self._modules for name in HOOKS]
        state = {value: dict(entries) for value, entries in optimizer.state.items()}
        try:
            self._shard(whole, copy_optimizer(optimizer, chosen), fillings)
        except BaseException:
            remove_attributes((*self._modules, *self._parameters), self._known_names)
            for value, data, gradient, known in before:
                sharded.unregister_flat_shard(value)
                unregister_holder([value])
                value.data, value.grad = data, gradient
                for key in set(value._post_accumulate_grad_hooks or ()) - known:
                    del value._post_accumulate_grad_hooks[key]
            for module, name, known in hooks:
                drop_hooks(module, name, known)
            optimizer.state.clear()
            optimizer.state.update(state)
            raise
        for value, _, gradient, _ in before:
            if gradient is None:
                continue
            if self.steps(value):
                self.write_gradient(value, gradient.detach())
            else:
                _set_whole_gradient(value, gradient)

    def _shard(self, whole: nn.Module, inner: Optimizer, fillings: Sequence[WeightFilling]) -> None:
        """Make an engine that shards the parameters."""
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
        self._flats = list(find_flat_tensors(self._zero, self._stage, self._comm.world))
        if self._steps_weights:
            for (flat, _), shards in zip(self._flats, self._zero.parallel_partitioned_bit16_groups, strict=True):
                flat.data = shards[self._comm.world.rank].data
        if self._stage < 3:
            self._zero._update_model_bit16_weights = lambda index: None  # each step: `reload_changed_weights` does it
        self._shards = {id(place.parameter): place.shard for _, places in self._flats for place in places}
        self._whole_gradients = WholeGradients(self._shards, self._comm)
        register_holder([place.parameter for _, places in self._flats for place in places], self)
        for value in self._parameters:
            value.__getstate__ = partial(visible_attributes, value)  # type: ignore[method-assign]  # when it is pickled
            if self._stage == 3:
                sharded.register_flat_shard(value, shard_of(value, self._comm.world, value.ds_tensor))
        if self._stage == 3:
            mark_partitioned(self._parameters, self.passes)
        hide_attributes((*self._modules, *self._parameters), self._known_names)
        self._state = FlatState(self.optimizer, self._zero.optimizer, self._flats, self.states)
        # Where the weights are in the flat tensors, and their addresses there.
        self._homes = [value.data for value in self._parameters] if self._stage < 3 else []
        self._addresses = [home.data_ptr() for home in self._homes]
        self._versions = self._version()
        # The version of each parameter that DeepSpeed keeps whole between passes.
        self._whole_versions = {value: value._version for value in self._persistent}

    @property
    def shards_weights(self) -> bool:
        """Whether this rank holds a shard of the weights only."""
        return self._stage == 3

    @property
    def inner(self) -> Any:
        """The optimizer that steps this rank's flat shards."""
        return self._zero.optimizer

    @property
    def _steps_weights(self) -> bool:
        """Whether this rank steps its shard of the model's weights themselves, and not of a copy."""
        return self._stage < 3 and not self._offloads

    @property
    def master_bytes(self) -> int:
        """Bytes of the copies of weights that this rank steps; 0 if it steps the model's weights."""
        if self._steps_weights:
            return 0
        shown = {value.ds_tensor.untyped_storage().data_ptr() for value in self._parameters} if self._stage == 3 else ()
        return sum(flat.nbytes for flat, _ in self._flats if flat.untyped_storage().data_ptr() not in shown)

    def begin_backward(self) -> None:
        """Prepare a backward pass, whose gradients are added to existing ones."""
        if self._whole_gradients.has_any:
            self.finish_gradients()
        if self._is_finished:
            self._whole_gradients.refuse_partly_dropped()
            self._whole_gradients.store(self._gradient_shards())
            self._earlier = [value.clone() for _, value in self._gradient_shards()]
            self._clear_sums()
        self._whole_gradients.clear()
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._engine.set_gradient_accumulation_boundary(False)
        self._zero.clear_backward_seen_flag()
        if self._stage == 3:
            self._zero.micro_step_id = 1  # add: `_clear_sums` has set all to zero
        self._zero.backward_prologue()
        self._zero.enter_backward()

    @property
    def is_reached(self) -> bool:
        """Whether the backward pass has computed gradients of these models on this rank."""
        return self._zero._backward_hook_state.hooks_fired_this_backward > 0

    def end_backward(self, *, is_reached: bool) -> None:
        """Average the rest of the gradients, if the stage shards gradients; every rank must call.

        ``is_reached``: whether there are new gradients on any rank.
        """
        if not is_reached:
            self._zero.exit_backward()
            return
        self.has_gradients = self._has_sums = True
        self._num_reached += self._zero._backward_hook_state.hooks_fired_this_backward
        if self._stage < 3:
            self._zero.setup_buckets()  # DeepSpeed does it when it receives a gradient, which not every rank may have
        if self._stage > 1:
            self._engine.allreduce_gradients()
        self._zero.backward_epilogue()
        self._zero.exit_backward()

    def finish_gradients(self, factor: float | Tensor = 1.0) -> None:
        """Complete the passes' gradients, multiply them by ``factor`` and prepare them for `gradients`.

        Every rank calls. Does nothing if they are complete, or if there are none.
        """
        if self._is_finished or not self.has_gradients:
            return
        if not self._has_sums:
            self._run_empty_pass()
        held = [value.nbytes for value in self._parameters if value.requires_grad]
        self.gradient_bytes = sum(held) if self._stage == 1 else sum(flat.nbytes for flat, _ in self._flats)
        if self._stage == 1:
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.allreduce_gradients()
            self._engine.set_gradient_accumulation_boundary(False)
        else:
            self._zero.finalize_gradient_accumulation_boundary()
        self._is_finished = True
        if isinstance(factor, Tensor) or factor != 1.0:
            multiply_tensors((value for _, value in self._gradient_shards()), factor)
        earlier, self._earlier = self._earlier, []
        if earlier:
            for (_, value), added in zip(self._gradient_shards(), earlier, strict=True):
                value.add_(added)

    def _run_empty_pass(self) -> None:
        """Make DeepSpeed hold gradients of zeros; every rank must call."""
        self._begin_pass()
        self.end_backward(is_reached=True)

    def steps(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer steps a parameter."""
        return id(parameter) in self._shards

    def read_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the full gradient of a parameter after `finish_gradients`; changes of it have effect.

        Every rank calls.
        """
        if not self.has_gradients:
            return None
        self._warn_of_unused()
        return self._whole_gradients.read(parameter, self._gradient_shards(), self._flats[0][0])

    def write_gradient(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace the whole gradient of a parameter; None drops it. Every rank must call."""
        self._whole_gradients.discard(parameter)
        if value is None:
            if self.has_gradients and self._whole_gradients.drop(parameter):
                self.drop_gradients()
            return
        if not self.has_gradients:
            self.has_gradients = True
            self._whole_gradients.drop_all()
        if self._whole_gradients.replace(parameter, value):
            self._num_reached += 1

    @property
    def has_incomplete_gradients(self) -> bool:
        """Whether there are gradients that `finish_gradients` has not completed."""
        return self.has_gradients and not self._is_finished

    def apply_gradient_writes(self) -> None:
        """Complete gradients, and apply changes that code has made to them; every rank must call."""
        if self.has_gradients:
            self.finish_gradients()  # engines of an optimizer that was released
            self._warn_of_unused()
            self._whole_gradients.store(self._gradient_shards(), keeps=True)

    def gradient_shard(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this rank's shard of the complete gradient of a parameter; None if there is none, or incomplete."""
        if not self._is_finished:
            return None
        return self._whole_gradients.gradient_shard(parameter, self._gradient_shards(), self._flats[0][0])

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield this rank's shard of each gradient, flat, after `finish_gradients`; changes in place have effect."""
        self._whole_gradients.store(self._gradient_shards())
        yield from self._gradient_shards()

    def _gradient_shards(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if not self._is_finished:
            return
        for number, (flat, places) in enumerate(self._flats):
            if self._offloads:
                yield from ((place.parameter, place.narrow(flat.grad)) for place in places)
            elif self._stage == 3:
                for place, value in zip(places, self._zero.averaged_gradients.get(number) or (), strict=False):
                    yield place.parameter, value.view(-1)[: place.shard.ranges[place.shard.rank][1]]
            else:
                averaged = self._zero.averaged_gradients.get(number) or ()
                shards = [value for value in averaged if not getattr(value, "_zero_padding", False)]
                here = self._zero.params_in_partition[number]
                yield from zip(here, shards, strict=False)

    def step(self) -> None:
        """Step this rank's shard, and gather the result."""
        self.has_overflowed = False
        if len(self.optimizer.param_groups) != self._num_groups:
            raise MisuseError(
                f"the {type(self.optimizer).__name__} has {len(self.optimizer.param_groups)} groups, and had "
                f"{self._num_groups} when it was prepared: DeepSpeed shards them once. Prepare model and optimizer "
                "again after add_param_group (free_memory(model, optimizer) first)"
            )
        self._apply_loaded()
        if not self.has_gradients:
            return
        self._warn_of_unused()
        self.finish_gradients()
        self._whole_gradients.refuse_partly_dropped()
        self._whole_gradients.store(self._gradient_shards())
        averaged = dict(self._zero.averaged_gradients)
        for group, index in zip(self.inner.param_groups, self._indices, strict=True):
            outer = self.optimizer.param_groups[index]
            group.update({name: value for name, value in outer.items() if name != "params"})
        copy_attributes(self.optimizer, self.inner)
        self._zero.step()
        copy_attributes(self.inner, self.optimizer)
        self.states.warn_of_step()
        self.has_overflowed = bool(self._zero.overflow)
        if self.has_overflowed:
            self.drop_gradients()
            return
        self._zero.averaged_gradients.update(averaged)  # a step leaves gradients, to which a pass may add
        self._state.update_user_state()
        self._versions = self._version()

    def _warn_of_unused(self) -> None:
        """Warn, once, if there are gradients of some parameters only."""
        if self._has_warned or self._whole_gradients.are_partly_dropped or not sharded.reads_together():
            return
        num_trained = len(self._shards)
        if self._num_reached < num_trained:
            self._has_warned = True
            warn_at_user_line(_UNUSED.format(number=num_trained - self._num_reached, all=num_trained))

    def zero_gradients(self) -> None:
        """Set gradients to zero."""
        if self.has_gradients:
            self._whole_gradients.refuse_partly_dropped()
            self._whole_gradients.clear()
            self._earlier.clear()
            self._clear_sums()

    def drop_gradients(self) -> None:
        """Drop gradients."""
        self._num_reached = 0
        self._whole_gradients.clear()
        self._earlier.clear()
        if self.has_gradients:
            self.has_gradients = False
            self._clear_sums()

    def _clear_sums(self) -> None:
        """Drop DeepSpeed's sums of gradients, to which it would add."""
        self._is_finished = self._has_sums = False
        self._zero.zero_grad(set_to_none=True)
        for number in range(len(self._flats)):
            self._zero.averaged_gradients[number] = None
            if self._stage < 3:
                self._zero.all_grad_tensors[number] = None
        if self._stage < 3:
            self._zero.micro_step_id = -1
            for value in self._parameters:
                value.grad_accum = None
            if self._offloads:
                self._zero.reset_cpu_buffers()
                self._zero._offload_accumulated_param_ids = set()
        else:
            self._zero.grad_partitions_flat_buffer.zero_()
        if self._offloads:
            for flat, _ in self._flats:
                flat.grad.zero_()

    def load_optimizer(self, states: Mapping[nn.Parameter, Mapping[str, Any]], whole: Callable[[Any], Any]) -> None:
        """Load the optimizer's state from ``states``; ``whole`` reads one of its tensors. Every rank must call."""
        self._state.load(states, whole)

    def undo(self, *, keeps_gradients: bool) -> None:
        """Restore models and optimizer, with ``keeps_gradients`` also the gradients; every rank must call."""
        self._apply_loaded()
        if keeps_gradients:
            self.finish_gradients()
        else:
            self.drop_gradients()
        stepped = [place.parameter for _, places in self._flats for place in places]
        gradients = {value: self.read_gradient(value) for value in stepped}
        unregister_holder(stepped)
        self._state.release()
        weights = [sharded.gather_full(value, self._comm) for value in self._parameters] if self._stage == 3 else []
        states = self._state.gather(self._comm)
        self._engine.destroy()
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        stack = parameter_offload.FWD_MODULE_STACK
        stack[:] = [item for item in stack if item is not self._engine.module]
        for value in self._parameters:
            sharded.unregister_flat_shard(value)
        unmark_partitioned(self._parameters)
        for value, found in zip(self._parameters, weights or [v.data.clone() for v in self._parameters], strict=True):
            value.data = found
            if not keeps_gradients or value in gradients:
                value.grad = gradients.get(value)
        remove_hidden((*self._modules, *self._parameters))
        for parameter, values in states.items():
            if values:
                self.optimizer.state[parameter] = values

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather full parameters in the block, and keep changes that the block makes to them; every rank must call."""
        if self._stage < 3:
            yield
            return
        self.apply_weight_writes()
        before = [value.data for value in self._parameters]
        for value in self._parameters:
            value.data = sharded.gather_full(value, self._comm)
        try:
            yield
        finally:
            for value, data in zip(self._parameters, before, strict=True):
                sharded.local_shard(value).copy_(sharded.own_shard(value, value.data))
                value.data = data
            self._whole_versions = {value: value._version for value in self._persistent}

    def detects_writes_by_version(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter and writes to it can be detected by its version counter only."""
        return id(tensor) in self._ids and (self._offloads if self._stage < 3 else self.passes.number > 0)

    @contextmanager
    def without_writes(self) -> Iterator[None]:
        """Raise `MisuseError` if the block writes to parameters, as the changes are not copied into the shards."""
        before = [value._version for value in self._parameters]
        yield
        for value, version in zip(self._parameters, before, strict=True):
            if value._version != version:
                named = (name for model in self.models for name, other in model.named_parameters() if other is value)
                raise MisuseError(LOST_WRITE.format(name=next(named, "a parameter")))

    @property
    def _persistent(self) -> list[Any]:
        """The parameters that stage 3 keeps whole between passes."""
        return self._zero.persistent_parameters if self._stage == 3 else []

    @torch.no_grad()
    def apply_weight_writes(self) -> None:
        """Copy to this rank's shards changes that code has made to values of state dicts and to gathered parameters."""
        self.states.write_back()
        for value in self._persistent:
            if value._version != self._whole_versions[value]:
                self._whole_versions[value] = value._version
                sharded.copy_into(value, value.data)

    def reload_changed_weights(self) -> None:
        """Update DeepSpeed's flat tensors if other code has changed the weights; every rank must call."""
        self.apply_weight_writes()
        has_moved = self._copy_moved_weights()
        if self._steps_weights or not (has_moved or self._version() != self._versions):
            return
        if self._persistent:
            for value in self._persistent:
                value.partition()
            self._persistent[0].all_gather(self._persistent)
        self._zero.refresh_fp32_params()
        self._versions = self._version()

    def _copy_moved_weights(self) -> bool:
        """Copy weights whose memory code has replaced into the flat tensors, and return whether there are any.

        Raises `MisuseError` if one has another dtype or shape.
        """
        if not self._homes or [value.data_ptr() for value in self._parameters] == self._addresses:
            return False
        for value, home in zip(self._parameters, self._homes, strict=True):
            if value.data_ptr() != home.data_ptr():
                if (value.dtype, value.shape, value.device) != (home.dtype, home.shape, home.device):
                    raise MisuseError(_OTHER_KIND.format(now=_kind_of(value), before=_kind_of(home)))
                home.copy_(value.data)
                value.data = home
        return True

    def copy_model(self, model: nn.Module, *, is_whole: bool = False) -> nn.Module:
        """Return a copy of one of these models, without anything of DeepSpeed's, that has the same parameters.

        With ``is_whole`` parameters of which this rank holds a shard are replaced by whole ones.
        """
        known: dict[int, Any] = {}
        for value in model.parameters() if is_whole else ():
            if sharded.is_sharded(value):
                known[id(value)] = nn.Parameter(sharded.full_tensor(value), value.requires_grad)
        return copy_module(model, known)

    @torch.no_grad()
    def _fill(self, filling: WeightFilling) -> None:
        """Shard parameters on the meta device, one at a time, and read this rank's shard of each."""
        theirs = deepspeed.zero.Init(config_dict_or_path=self.settings, mem_efficient_linear=False)
        empty: list[Any] = list(filling.parameters())
        for value in empty:
            fill_parameter(
                value, torch.empty(value.shape, dtype=value.dtype, device="cpu")
            )  # freed before it is written to
            theirs._convert_to_deepspeed_param(value)
            value.partition()
            start, length = shard_of(value, self._comm.world).ranges[self._comm.world.rank]
            values = torch.empty(length, dtype=value.dtype, device="cpu")
            filling.fill_elements(value, start, values)
            value.ds_tensor[:length].copy_(values)

    def _apply_loaded(self) -> None:
        """Apply values that were loaded into the model or the optimizer since the last step."""
        self.reload_changed_weights()
        self._state.load_changes()

    def _version(self) -> tuple[int, ...]:
        """Return version counters, which change when code other than DeepSpeed writes into the weights."""
        held = [value.ds_tensor for value in self._parameters] if self._stage == 3 else self._parameters
        return tuple([value._version for value in held])


_OTHER_KIND = (
    "a parameter is now {now}, and was {before} when it was prepared: DeepSpeed steps it in the memory that it had. "
    "Change the model in a cell before it is trained, or train with --strategy ddp"
)
_UNUSED = (
    "{number} of {all} parameters have no gradient: on one device their .grad is None, and the optimizer leaves them "
    "out. DeepSpeed has zeros, and steps with them, so momentum and weight decay continue. If that matters, train with "
    "--strategy ddp or fsdp"
)


@contextmanager
def _without_broadcast(parameters: Sequence[Any]) -> Iterator[None]:
    """Mark parameters so that DeepSpeed does not broadcast them: it fails for 0-dim ones."""
    for value in parameters:
        value.ds_optim_param = None
    try:
        yield
    finally:
        for value in parameters:
            del value.ds_optim_param


def _set_whole_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Set the gradient of a parameter whose data is empty; torch compares the shapes only at the assignment."""
    data = parameter.data
    parameter.data = gradient.new_empty(()).expand(gradient.shape)
    parameter.grad = gradient
    parameter.data = data


def _kind_of(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)} on {value.device}"
