"""The parameters of modules of a sharded model: the sharded ones, except while it computes with unsharded ones.

PyTorch leaves the parameters of the outermost unit unsharded from a forward pass to the next backward pass. Code of a
plain cell that reads `model.head.weight` there would get a tensor that is not the optimizer's, and that is freed later.
In the names here ``shards`` are the sharded parameters, and ``gathered`` ones the unsharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.strategies.fsdp.parameter_groups import places_of


class VisibleShards:
    """Puts the shards into the modules of a sharded model in plain cells while the model does not compute.

    Unsharded parameters are kept, and gathered again before the next forward pass only if code may have written to the
    sharded ones. ``groups`` are, for each unit, the groups of parameters that are gathered for its forward pass.
    """

    def __init__(self, groups: Mapping[nn.Module, Sequence[Any]], computes: Callable[[], bool]) -> None:
        self._groups = groups
        # Returns whether a unit is in its forward pass.
        self._computes = computes
        # By group of unsharded parameters whose modules have the sharded ones: `GatheredCopies.writes` at that time.
        self._hidden: dict[Any, int] = {}
        self._computes_backward = False
        for unit in groups:
            unit.register_forward_pre_hook(self._before_forward, prepend=True)
            unit.register_forward_hook(self._after_forward, always_call=True)

    def show_gathered(self) -> None:
        """Put gathered parameters into the modules until `hide_gathered`, for recomputation in the backward pass."""
        self._computes_backward = True
        for group in list(self._hidden):
            self._show(group)

    def hide_gathered(self) -> None:
        """Put the shards into the modules again."""
        self._computes_backward = False
        self._hide()

    def gathered(self) -> dict[int, nn.Parameter]:
        """Return, by the id of a shard, the gathered parameter that the graph of the last forward pass has."""
        groups = [group for groups in self._groups.values() for group in groups if group.is_unsharded]
        return {id(param.sharded_param): param._unsharded_param for group in groups for param in group.fsdp_params}

    def _before_forward(self, unit: nn.Module, *_: Any) -> None:
        copies = sharded.copies()
        for group in self._groups[unit]:
            for param in group.fsdp_params:
                _refuse_replaced(param)
            is_written = copies is not None and copies.may_be_written(self._hidden.get(group, copies.writes))
            if group in self._hidden and is_written and not self._computes_backward:
                self._hidden.pop(group)
                group.reshard()
            else:
                self._show(group)

    def _after_forward(self, unit: nn.Module, *_: Any) -> None:
        if not (self._computes_backward or self._computes()):
            self._hide()

    def _show(self, group: Any) -> None:
        if self._hidden.pop(group, None) is not None and group.is_unsharded:
            for param in group.fsdp_params:
                if param._unsharded_param.requires_grad != param.sharded_param.requires_grad:
                    param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)
                _replace(param, param.sharded_param, param._unsharded_param)

    def _hide(self) -> None:
        copies = sharded.copies()
        if copies is None or not sharded.reads_together():
            return
        for group in (group for groups in self._groups.values() for group in groups):
            if group.is_unsharded:
                self._hidden[group] = copies.writes
                for param in group.fsdp_params:
                    _replace(param, param._unsharded_param, param.sharded_param)


def _refuse_replaced(param: Any) -> None:
    """Raise `MisuseError` if code has replaced a parameter, since the gathered one would overwrite it."""
    for module, name in places_of(param):
        now = module._parameters.get(name)
        if now is not None and now is not param.sharded_param and now is not getattr(param, "_unsharded_param", None):
            raise MisuseError(
                f"{name} of a {type(module).__name__} was replaced after its model was sharded, so the model would "
                f"compute with the former one: write into it (`{name}.data.copy_(...)`), replace it in a cell of its "
                "own before the training, or train with --strategy ddp"
            )


def _replace(param: Any, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter in the modules that still have it."""
    for module, name in places_of(param):
        if module._parameters.get(name) is old:
            module._parameters[name] = new
