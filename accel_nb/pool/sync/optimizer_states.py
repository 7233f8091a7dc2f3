"""The state of optimizers, as it is compared, sent and set in place in the receiving process."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accel_nb.pool.sync.contents.content_kinds import content_of, is_replaced_whole, set_attribute
from accel_nb.pool.sync.objects.identities import Identities
from accel_nb.pool.sync.objects.object_kinds import is_optimizer, is_tensor, is_training_object, parameters_of
from accel_nb.pool.sync.objects.shared_ids import OptimizerParts, SharedId, state_parts
from accel_nb.pool.sync.objects.shared_memory import OwnData, data_of
from accel_nb.pool.sync.objects.user_attributes import has_tensor_keys, optimizer_attributes
from accel_nb.pool.sync.objects.user_hooks import (
    HookId,
    changed_hooks,
    method_ids,
    own_methods,
    set_changed_hooks,
    set_own_methods,
    without_hooks,
)
from accel_nb.pool.sync.reductions.optimizer_reduction import is_property
from accel_nb.pool.sync.stream.pickling import copyable_values
from accel_nb.runtime.distributed.sharded import is_sharded, shard_state

_DICTS = (dict, OrderedDict, defaultdict)
_PLAIN = bool | int | float | complex | str | bytes | None


@dataclass(frozen=True, slots=True)
class OptimizerContent:
    """The fingerprints of an optimizer's parts that are sent separately."""

    tensors: tuple[Any, ...]
    numbers: bytes
    """That of the other values in the state, such as counts of steps."""
    params: tuple[Identities, ...]
    """The parameters of each group."""
    groups: bytes
    names: frozenset[str]
    """Those of the attributes that code has set."""
    attributes: bytes
    hooks: tuple[HookId, ...]
    methods: tuple[tuple[str, int], ...]
    parts: OptimizerParts


def group_sizes(optimizer: Any) -> tuple[int, ...]:
    """Return how many parameters each group of an optimizer has."""
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Return the optimizer's groups, with None in place of the parameters."""
    return [
        {key: None if key == "params" else value for key, value in group.items()} for group in optimizer.param_groups
    ]


def group_parameters(optimizer: Any) -> tuple[Identities, ...]:
    """Return the parameters of each group of an optimizer, to detect that they were replaced."""
    return tuple(Identities(group["params"]) for group in optimizer.param_groups)


def state_tensors(optimizer: Any) -> list[Any]:
    """Return every tensor of an optimizer's state, of lists in it too, as the directions of LBFGS."""
    own = [value for state in optimizer.state.values() for value in _leaves(state) if is_tensor(value)]
    return own + [tensor for _, item in inner_optimizers(optimizer) for tensor in state_tensors(item)]


def state_numbers(optimizer: Any) -> list[Any]:
    """Return the plain values of an optimizer's state with their places, such as a count of steps of a parameter."""
    own = [
        (number, place, value)
        for number, state in enumerate(optimizer.state.values())
        for place, value in enumerate(_leaves(state))
        if isinstance(value, _PLAIN)
    ]
    return own + [state_numbers(item) for _, item in inner_optimizers(optimizer)]


def _leaves(state: Any) -> Iterator[Any]:
    """Yield the items of the dicts, lists and tuples in a state, with the keys of dicts that are text."""
    if type(state) in _DICTS:
        for key, value in state.items():
            yield from (key,) if isinstance(key, str) else ()
            yield from _leaves(value)
    elif type(state) in (list, tuple):
        for value in state:
            yield from _leaves(value)
    else:
        yield state


def optimizer_bytes(optimizer: Any) -> int:
    """Return the size of the state tensors in bytes."""
    return sum(tensor.nbytes for tensor in state_tensors(optimizer))


def optimizer_state(
    optimizer: Any,
    namespace: dict[str, Any],
    shared: Mapping[int, SharedId],
    *,
    with_tensors: bool,
    before: OptimizerContent | None = None,
) -> dict[str, Any]:
    """Return hyperparameters and attributes; if ``with_tensors`` also the state of the parameters.

    ``before`` is the last content that both processes had: groups that have other parameters since include them.
    Without it, parameters, hooks and replaced methods are left out.
    """
    with without_hooks(optimizer):
        kept = _read_state(optimizer) if with_tensors else None
    if kept is not None:
        kept = {key: _map_values(_own_tensor, values) for key, values in kept.items()}
    inner = {
        name: optimizer_state(item, namespace, shared, with_tensors=with_tensors)
        for name, item in inner_optimizers(optimizer)
    }
    now = group_parameters(optimizer)
    known = now if before is None else before.params
    params = [
        None if known[number : number + 1] == now[number : number + 1] else group["params"]
        for number, group in enumerate(optimizer.param_groups)
    ]
    has_other_methods = before is not None and method_ids(optimizer) != before.methods
    return {
        "groups": hyperparameters(optimizer),
        "params": params,
        "state": kept,
        "kept_tensors": [] if before is None else _places_of_kept_tensors(optimizer, before),
        "own": own_values(optimizer, namespace, shared),
        "gone": [] if before is None else sorted(before.names - optimizer_attributes(optimizer).keys()),
        "keyed": keyed_values(optimizer),
        "inner": inner,
        "hooks": None if before is None else changed_hooks(optimizer, before.hooks),
        "methods": own_methods(optimizer) if has_other_methods else None,
    }


def _own_tensor(value: Any) -> Any:
    """Return a tensor as data, even if another name refers to it.

    A loaded state dict may contain the same tensor; a reference to that would mean its value before the cell. A sharded
    tensor is gathered as it is sent.
    """
    if not is_tensor(value):
        return value
    return OwnData(value if is_sharded(value) else value.detach())


def _map_values(change: Callable[[Any], Any], values: Any) -> Any:
    """Return the state of a parameter with its values changed; that of the whole optimizer may be a value itself."""
    return {name: change(value) for name, value in values.items()} if isinstance(values, dict) else change(values)


def _places_of_kept_tensors(optimizer: Any, before: OptimizerContent) -> list[str]:
    """Return the places in the state that have the same tensors as before."""
    return [part[0] for part, tensor in state_parts(optimizer).items() if before.parts.has(part, tensor)]


def attribute_names(optimizer: Any) -> frozenset[str]:
    """Return the names of the attributes that code has set on an optimizer, to find those that it deletes."""
    return frozenset(optimizer_attributes(optimizer))


def inner_optimizers(optimizer: Any) -> list[tuple[str, Any]]:
    """Return by attribute the optimizers that an optimizer wraps, as SAM does."""
    return [(name, item) for name, item in vars(optimizer).items() if is_optimizer(item) and item is not optimizer]


def wrapped_optimizers(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it wraps, directly or not."""
    return [optimizer, *(found for _, item in inner_optimizers(optimizer) for found in wrapped_optimizers(item))]


def set_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Set hyperparameters and own values in place, and load the state of the parameters if it is given."""
    groups = optimizer.param_groups
    del groups[len(state["params"]) :]
    groups += [{} for _ in state["params"][len(groups) :]]
    for group, params, values in zip(groups, state["params"], state["groups"], strict=True):
        own = {**values, "params": group["params"] if params is None else params}
        group.clear()
        group.update(own)
    for name in state["gone"]:
        vars(optimizer).pop(name, None)
    vars(optimizer).update(state["own"])
    for name, value in state["keyed"].items():
        set_attribute(optimizer, name, _with_keys(value, dict(enumerate(parameters_of(optimizer)))))
    if state["state"] is not None:
        parameters = parameters_of(optimizer)
        # A wrapper may not have called `Optimizer.__init__`: this adds the attributes that torch needs.
        _optimizer_class().__setstate__(optimizer, {})
        own = {key: _map_values(data_of, values) for key, values in state["state"].items()}
        own = {
            key: shard_state(values, parameters[key]) if type(key) is int and isinstance(values, dict) else values
            for key, values in own.items()
        }
        with without_hooks(optimizer):
            _load_state(optimizer, own, state["kept_tensors"])
    for name, item in inner_optimizers(optimizer):
        set_optimizer_state(item, state["inner"][name])
    if state["hooks"] is not None:
        set_changed_hooks(optimizer, state["hooks"])
    if state["methods"] is not None:
        set_own_methods(optimizer, state["methods"])


def _read_state(optimizer: Any) -> dict[Any, Any]:
    """Return the state by the parameters' indices, and that of the whole optimizer by its own keys.

    Of a wrapper whose state dict has another form, it is the wrapper's own state.
    """
    saved = optimizer.state_dict()
    if "state" in saved:
        return saved["state"]
    indices: dict[Any, Any] = {value: number for number, value in enumerate(parameters_of(optimizer))}
    return {indices.get(key, key): values for key, values in optimizer.state.items()}


def _load_state(optimizer: Any, state: Mapping[Any, Any], places: Collection[str]) -> None:
    """Load a state; the tensors at ``places``, to which a state dict of the user may refer, are changed in place."""
    groups, kept = optimizer.param_groups, optimizer.state
    earlier_tensors = {part[0]: tensor for part, tensor in state_parts(optimizer).items()}
    saved = optimizer.state_dict()
    if "state" not in saved:
        parameters = parameters_of(optimizer)
        kept.clear()
        kept.update({parameters[key] if type(key) is int else key: values for key, values in state.items()})
    else:
        optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
        if not _loads_state_itself(optimizer):
            _restore_containers(optimizer, groups, kept)
    parameters = parameters_of(optimizer)
    for part, loaded in state_parts(optimizer).items():
        known = earlier_tensors.get(part[0])
        if part[0] in places and known is not None and _is_alike(known, loaded):
            number, _, name = part[0].partition(":")
            optimizer.state[parameters[int(number)]][name] = known.copy_(loaded)


def own_values(optimizer: Any, namespace: dict[str, Any], shared: Mapping[int, SharedId]) -> dict[str, Any]:
    """Return the attributes of an optimizer that can be copied, such as a count of steps, without those of torch.

    They are data (plain values, tensors that require no gradients, and containers of these) and objects.
    """
    own = {name: value for name, value in optimizer_attributes(optimizer).items() if not has_tensor_keys(value)}
    data = {name: value for name, value in own.items() if _is_data(value)}
    others = {name: value for name, value in own.items() if name not in data and _is_object(value)}
    return data | (copyable_values(others, namespace, shared) if others else {})


def keyed_values(optimizer: Any) -> dict[str, Any]:
    """Return the containers among the attributes of an optimizer in which parameters are keys: as `ParameterIndex`."""
    indices = {value: ParameterIndex(number) for number, value in enumerate(parameters_of(optimizer))}
    return {
        name: _with_keys(value, indices)
        for name, value in optimizer_attributes(optimizer).items()
        if has_tensor_keys(value) and _is_data(value, indices)
    }


def _is_object(value: Any) -> bool:
    """Return whether a value has content that is sent: not a function, a model or a tensor."""
    is_other = is_tensor(value) or is_training_object(value) or isinstance(value, types.FunctionType | types.MethodType)
    return not is_other and (is_replaced_whole(value) or content_of(value) is not None)


class ParameterIndex(int):
    """The index of a parameter among those of its optimizer."""


def _is_data(value: Any, parameters: Collection[Any] = ()) -> bool:
    if is_tensor(value):
        return not value.requires_grad and not is_sharded(value)
    if type(value) in _DICTS:
        return all(
            (isinstance(key, _PLAIN) or (is_tensor(key) and key in parameters)) and _is_data(item, parameters)
            for key, item in value.items()
        )
    return isinstance(value, _PLAIN) or (
        type(value) in (list, tuple) and all(_is_data(item, parameters) for item in value)
    )


def _with_keys(value: Any, other: Mapping[Any, Any]) -> Any:
    """Return data in which the keys of dicts are replaced: parameters by their indices, or indices by parameters."""
    if type(value) in _DICTS:
        found = copy.copy(value)
        found.clear()
        for key, item in value.items():
            is_index = is_tensor(key) or type(key) is ParameterIndex
            found[other[key] if is_index else key] = _with_keys(item, other)
        return found
    return type(value)(_with_keys(item, other) for item in value) if type(value) in (list, tuple) else value


def _optimizer_class() -> Any:
    import torch

    return torch.optim.Optimizer


def _loads_state_itself(optimizer: Any) -> bool:
    return type(optimizer).load_state_dict is not _optimizer_class().load_state_dict


def _restore_containers(optimizer: Any, groups: list[dict[str, Any]], state: dict[Any, Any]) -> None:
    """Copy loaded groups and state into the optimizer's own list and dict, to which other objects may refer.

    A wrapper such as SAM or Lookahead has the groups and the state of the optimizer that it wraps.
    """
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in loaded.items() if key != "params"})
    if optimizer.state is not state:
        loaded_state = dict(optimizer.state)
        state.clear()
        state.update(loaded_state)
    for name, value in (("param_groups", groups), ("state", state)):
        if not is_property(type(optimizer), name):
            setattr(optimizer, name, value)


def _is_alike(tensor: Any, other: Any) -> bool:
    names = ("dtype", "shape", "device", "layout")
    return type(tensor) is type(other) and all(getattr(tensor, name) == getattr(other, name) for name in names)
