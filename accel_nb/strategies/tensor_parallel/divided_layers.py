"""Tensor parallelism: linear layers of which each rank holds a shard and computes a part.

Activations outside of divided layers are plain tensors, equal on the ranks of one layer; user code gets no others. A
layer that is divided by its outputs (*by columns* of the transposed weight) is followed by one that is divided by its
inputs (*by rows*), so that two layers need one sum in the forward and one in the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.layer_exchange import LayerExchange
from accel_nb.runtime.distributed.sharded import shard_with_gradient
from accel_nb.runtime.tensors.instance_patching import (
    innermost_class,
    replace_forward,
    restore_forward,
    unbound_forward,
)
from accel_nb.runtime.tensors.module_paths import submodule_at
from accel_nb.strategies.block_calls import LATE_HOOK, CallHooks, inside


@dataclass(frozen=True, slots=True)
class LayersToDivide:
    """Layers that are divided together, by their names inside of the module ``owner``, itself a name in the model.

    ``whole`` are modules that compute with parts of activations and whole parameters, whose gradients are summed.
    ``attributes`` are numbers of the owner, such as the number of heads, that are divided while it computes. With
    ``draws`` random numbers, such as for dropout, are drawn for parts of activations.
    """

    owner: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    whole: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    draws: bool = False

    def part_names(self) -> list[tuple[str, int]]:
        """Return the names of the divided parameters inside of the owner, and the dim that is divided."""
        columns = [(f"{layer}.{leaf}", 0) for layer in self.columns for leaf in ("weight", "bias")]
        return columns + [(f"{layer}.weight", 1) for layer in self.rows]


def join(owner: str, name: str) -> str:
    """Return the name of a part of ``owner`` in the model."""
    return f"{owner}.{name}" if owner and name else owner or name


def divided_parameters(model: nn.Module, groups: Sequence[LayersToDivide]) -> dict[int, int]:
    """Return the divided dim of each parameter, by the parameter's id."""
    named = dict(model.named_parameters(remove_duplicate=False))
    places = ((join(group.owner, name), dim) for group in groups for name, dim in group.part_names())
    return {id(named[name]): dim for name, dim in places if name in named}


class LayerDivision:
    """Replaced forwards of divided layers and of their owners; `undo` restores them."""

    def __init__(self, model: nn.Module, groups: Sequence[LayersToDivide], exchange: LayerExchange, size: int) -> None:
        self._replaced: list[nn.Module] = []
        try:
            for group in groups:
                owner = submodule_at(model, group.owner)
                for name in group.columns:
                    self._replace(submodule_at(owner, name), _column_forward, exchange)
                for name in group.rows:
                    self._replace(submodule_at(owner, name), _row_forward, exchange)
                for name in group.whole:
                    self._replace(submodule_at(owner, name), _whole_forward, exchange)
                values = {name: vars(owner)[name] // size for name in group.attributes}
                self._replace(owner, _owner_forward, exchange, values)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the forwards; other replacements since then must be undone already."""
        for module in reversed(self._replaced):
            restore_forward(module)
        self._replaced.clear()

    def _replace(self, module: nn.Module, make: Callable[..., Callable[..., Any]], *options: Any) -> None:
        replace_forward(module, make(weakref.ref(module), unbound_forward(module), *options))
        self._replaced.append(module)


def _column_forward(module: Callable[[], Any], _: Any, exchange: LayerExchange) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        if not exchange.is_in_group:
            raise MisuseError(_PART_ALONE)
        layer = module()
        return F.linear(exchange.replicate(input), shard_with_gradient(layer.weight), shard_with_gradient(layer.bias))

    return forward


def _row_forward(module: Callable[[], Any], _: Any, exchange: LayerExchange) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        layer = module()
        result = exchange.sum_parts(F.linear(input, shard_with_gradient(layer.weight)))
        return result if layer.bias is None else result + layer.bias.to(result.dtype)  # which autocast may have chosen

    return forward


def _whole_forward(module: Callable[[], Any], forward: Any, exchange: LayerExchange) -> Callable[..., Any]:
    def with_replicated_parameters(*args: Any, **kwargs: Any) -> Any:
        own = module()._parameters
        before = dict(own)
        try:
            own.update({name: value if value is None else exchange.replicate(value) for name, value in before.items()})
            return forward(module(), *args, **kwargs)
        finally:
            own.update(before)

    return with_replicated_parameters


def _owner_forward(
    module: Callable[[], Any], forward: Any, exchange: LayerExchange, values: Mapping[str, int]
) -> Callable[..., Any]:
    hooks = CallHooks(inside(module()))

    def with_own_numbers(*args: Any, **kwargs: Any) -> Any:
        owner = module()
        if hooks.exist():
            raise MisuseError(LATE_HOOK.format(kind=innermost_class(owner).__name__, option="tp"))
        attributes = vars(owner)
        before = {name: attributes[name] for name in values}
        try:
            attributes.update(values)
            with exchange.shared_inputs():
                return forward(owner, *args, **kwargs)
        finally:
            attributes.update(before)

    return with_own_numbers


_PART_ALONE = (
    "a linear layer that is divided among workers by --tp was called by other code than the forward of its module, and "
    "would return a part of its output: call the module, or train with --tp 1"
)


@torch.no_grad()
def shard_of(value: Tensor, dim: int, index: int, size: int) -> Tensor:
    """Return a copy of one of ``size`` equal parts of a tensor."""
    return value.chunk(size, dim)[index].clone(memory_format=torch.contiguous_format)
