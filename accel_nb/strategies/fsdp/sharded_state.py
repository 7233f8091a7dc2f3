"""The state of models and optimizers, of which each rank holds a shard."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.checkpoint.encoding import Slice
from accel_nb.checkpoint.layout import Region
from accel_nb.checkpoint.load import StoredTensor, materialize
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.tensors.state_tree import map_state


def gather_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Replace the sharded tensors of a model's state dict by full ones; all names of a parameter have the same one."""
    parameters, copies = dict(model.named_parameters(remove_duplicate=False)), sharded.copies()
    made: dict[int, Any] = {}
    for name, value in state.items():
        key = id(parameters.get(name, value))
        if key not in made:
            made[key] = sharded.full_tensor(value)
            if copies is not None and made[key] is not value:
                copies.add(value, made[key], by_value=False)
        state[name] = made[key]


def shard_state_dict(model: nn.Module, state: Any) -> Any:
    """Return a state dict with full tensors sharded like the model's parameters."""
    here = dict(model.named_parameters(remove_duplicate=False))
    result = OrderedDict((name, _shard_if_full(here.get(name), value)) for name, value in state.items())
    if hasattr(state, "_metadata"):
        result._metadata = state._metadata  # type: ignore[attr-defined]
    return result


def _shard_if_full(parameter: Any, value: Any) -> Any:
    if not sharded.is_sharded(parameter) or sharded.is_sharded(value) or value.shape != parameter.shape:
        return value
    return sharded.shard_like(parameter, sharded.own_shard(parameter, value))


def own_shard_of(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return this rank's shard of a tensor of an optimizer's state that has the shape of a parameter."""
    return sharded.shard_state({"": value}, parameter)[""]


def sliced(state: Any, copied: bool) -> Any:
    """Return a state with a `Slice` in place of each tensor of which this rank holds a shard."""

    def slice_leaf(leaf: Any) -> Any:
        if sharded.is_sharded(leaf):
            shard = sharded.local_shard(leaf).detach()
            shard = shard.view([0] * leaf.dim()) if sharded.is_absent(leaf) else shard
            return Slice(shard.clone() if copied else shard, sharded.own_region(leaf)[0], tuple(leaf.shape))
        return leaf.detach().clone() if copied and isinstance(leaf, Tensor) else leaf

    return map_state(slice_leaf, state)


def groups_and_state(optimizer: Optimizer) -> tuple[list[list[nn.Parameter]], dict[Any, Any]]:
    """Return the parameters of an optimizer by group, and its state."""
    return [list(group["params"]) for group in optimizer.param_groups], dict(optimizer.state)


def restore_groups(optimizer: Optimizer, before: tuple[list[list[nn.Parameter]], dict[Any, Any]]) -> None:
    """Restore the groups and the state of an optimizer that `groups_and_state` has returned."""
    groups, state = before
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"][:] = parameters
    optimizer.state.clear()
    optimizer.state.update(state)


def shard_values(values: Mapping[str, Any], targets: Mapping[str, Any]) -> Any:
    """Return a state in which each tensor whose target is sharded is replaced by this rank's shard of it."""
    result = OrderedDict((name, _shard_value(value, targets.get(name))) for name, value in values.items())
    if hasattr(values, "_metadata"):
        result._metadata = values._metadata  # type: ignore[attr-defined]
    return result


def _shard_value(value: Any, target: Any) -> Any:
    """Return this rank's shard of a value if its target is sharded and of the same shape, else the full value."""
    if not sharded.is_sharded(target) or tuple(getattr(value, "shape", ())) != tuple(target.shape):
        return materialize(value)
    held = sharded.local_shard(target)
    if isinstance(value, Slice):
        shard = value.tensor
    elif isinstance(value, StoredTensor):
        shard = value.read(Region(*sharded.own_region(target)))
    else:
        shard = sharded.own_shard(target, value)
    return sharded.shard_like(target, shard.to(held.device).clone())
