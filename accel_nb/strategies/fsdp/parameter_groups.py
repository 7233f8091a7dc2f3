"""Changes of PyTorch's groups of sharded parameters, which are gathered together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

_REMOVED = object()


def groups_of(state: Any) -> Sequence[Any]:
    """Return the parameter groups of a unit's state; PyTorch up to 2.11 has at most one, under another name."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def adapt_group(group: Any, unit: nn.Module) -> None:
    """Change a group of parameters of a unit that `fully_shard` has just made.

    `fully_shard` would register hooks for state dicts on the module, with which it cannot be copied. The entries for
    their handles prevent that; `ShardedModel` does their work.
    """
    group._module_to_pre_save_state_dict_hook_handle = {unit: None}
    group._module_to_pre_load_state_dict_hook_handle = {unit: None}
    group._to_sharded = _keep_replaced(group, group._to_sharded)
    group.wait_for_unshard = _outside_inference_mode(group.wait_for_unshard)


def places_of(param: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that have a parameter of a group, each with the parameter's name in it."""
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def _keep_replaced(group: Any, to_sharded: Callable[[], None]) -> Callable[[], None]:
    """Keep replacements and removals of parameters by code when a gather ends."""

    def keep_and_shard() -> None:
        if group.is_sharded:
            return
        found: list[tuple[nn.Module, str, Any]] = []
        for param in group.fsdp_params:
            own = param.sharded_param, getattr(param, "_unsharded_param", None)
            places = ((module, name, module._parameters.get(name, _REMOVED)) for module, name in places_of(param))
            found += [place for place in places if not any(place[2] is value for value in own)]
        to_sharded()
        for module, name, value in found:
            if value is _REMOVED:
                del module._parameters[name]
            else:
                module._parameters[name] = value

    return keep_and_shard


def _outside_inference_mode(wait: Callable[[], None]) -> Callable[[], None]:
    """Create gathered parameters outside of inference mode: they can be trained after a first call in that mode."""

    def wait_for_unshard() -> None:
        if not torch.is_inference_mode_enabled():
            return wait()
        with torch.inference_mode(False), torch.no_grad():
            return wait()

    return wait_for_unshard
