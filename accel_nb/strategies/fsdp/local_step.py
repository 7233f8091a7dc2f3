"""Optimizer steps on the shards of sharded tensors that this rank holds.

PyTorch dispatches each operation on a `DTensor` in Python, and an optimizer makes about ten for each parameter; its
implementations for many tensors at once do not take a `DTensor` by default. The optimizers listed here compute each
element from that element alone, so they step this rank's shards as plain tensors, with the same result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.tensors.instance_patching import innermost_class

_ELEMENTWISE_OPTIMIZERS = frozenset({ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop})


def step_on_shards(optimizer: Optimizer, step: Callable[[], Any]) -> Any:
    """Call ``step``, the optimizer's original method, on this rank's shards as plain tensors if the result is the same.

    Hooks on the optimizer's step see the sharded tensors.
    """
    if innermost_class(optimizer) not in _ELEMENTWISE_OPTIMIZERS:
        return step()
    exchange = _Exchange(optimizer)
    if not exchange.is_possible():
        return step()
    before = optimizer.register_step_pre_hook(lambda *_: exchange.begin())
    after = optimizer.register_step_post_hook(lambda *_: exchange.end())
    hooks = after.hooks_dict_ref()
    assert hooks is not None, "the optimizer is alive"
    hooks.move_to_end(after.id, last=False)
    try:
        return step()
    finally:
        exchange.end()
        before.remove()
        after.remove()


class _Exchange:
    """Replaces an optimizer's sharded tensors by this rank's shards, and the shards by the sharded tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._sharded: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        self._shards = [[sharded.local_shard(value) for value in parameters] for parameters in self._sharded]
        self._state: Any = optimizer.state
        self._is_begun = False

    def is_possible(self) -> bool:
        """Return whether there is a sharded parameter, and gradients and state are sharded like their parameters."""
        is_any = False
        for value, shard in self._pairs():
            if shard is value:
                continue
            is_any = True
            state = self._state.get(value)
            like = [value.grad, *(item for item in state.values() if _has_dims(item))] if state else [value.grad]
            if type(shard) is not Tensor or not all(item is None or _is_sharded_alike(item, value) for item in like):
                return False
        return is_any and not any(group.get("differentiable") for group in self._optimizer.param_groups)

    def begin(self) -> None:
        """Replace the optimizer's sharded tensors by shards."""
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, values in self._state.items():
            shard = sharded.local_shard(key)
            state[shard] = (
                values if shard is key else {name: sharded.local_shard(item) for name, item in values.items()}
            )
        for value, shard in self._pairs():
            if shard is not value:
                shard.grad = None if value.grad is None else sharded.local_shard(value.grad)
        self._is_begun = True
        self._optimizer.state = state
        for group, shards in zip(self._optimizer.param_groups, self._shards, strict=True):
            group["params"] = shards

    def end(self) -> None:
        """Restore the sharded tensors, and add entries that the step has added to the state.

        A second call does nothing.
        """
        if not self._is_begun:
            return
        self._is_begun = False
        stepped = self._optimizer.state
        self._optimizer.state = self._state
        for group, parameters in zip(self._optimizer.param_groups, self._sharded, strict=True):
            group["params"] = parameters
        for value, shard in self._pairs():
            if shard is value:
                if shard in stepped:
                    self._state[shard] = stepped[shard]
                continue
            shard.grad = None
            if shard in stepped:
                own = self._state[value]
                for name, item in stepped[shard].items():
                    if sharded.local_shard(own.get(name)) is not item:
                        own[name] = sharded.shard_like(value, item) if _has_dims(item) else item

    def _pairs(self) -> list[tuple[Any, Any]]:
        found = zip(self._sharded, self._shards, strict=True)
        return [pair for parameters, shards in found for pair in zip(parameters, shards, strict=True)]


def _has_dims(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _is_sharded_alike(tensor: Any, parameter: Any) -> bool:
    return (
        sharded.is_sharded(tensor)
        and tensor.placements == parameter.placements
        and tensor.device_mesh == parameter.device_mesh
        and type(sharded.local_shard(tensor)) is Tensor
    )
